"""The algorithm: its output is the target's own whatever is drafted, and every way out frees both sessions."""

import asyncio
from collections.abc import Sequence as Tokens
from contextlib import aclosing

import pytest

from orchestrator import speculative_loop
from orchestrator.draft_session import NoDrafts
from orchestrator.sequence import RoundOutput, Sequence
from tandem.types import FinishReason
from tests.orchestrator.fakes import ScriptedProposer, ScriptedVerifier, letters, make_sequence

SCRIPT = letters("the quick brown fox jumps over the lazy dog")


def run(
    sequence: Sequence, proposer: speculative_loop.ProposerSession, verifier: ScriptedVerifier
) -> list[RoundOutput]:
    async def collect() -> list[RoundOutput]:
        return [output async for output in speculative_loop.generate(sequence, proposer, verifier)]

    return asyncio.run(collect())


def perfect(start: int, k: int) -> Tokens[int]:
    return SCRIPT[start : start + k]


def wrong(start: int, k: int) -> Tokens[int]:
    return letters("Z" * k)


def half_right(start: int, k: int) -> Tokens[int]:
    return [*SCRIPT[start : start + k // 2], *letters("Z" * (k - k // 2))]


def eos(start: int, k: int) -> Tokens[int]:
    return [63] * min(k, 1)


@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize("drafts_of", [perfect, wrong, half_right, eos, lambda start, k: []])
def test_the_output_does_not_depend_on_the_drafts(drafts_of: object, k: int) -> None:
    sequence = make_sequence(max_tokens=30, k=k)
    outputs = run(sequence, ScriptedProposer(drafts_of), ScriptedVerifier(SCRIPT))  # type: ignore[arg-type]
    assert "".join(output.text for output in outputs) == "the quick brown fox jumps over"
    assert sum(len(output.token_ids) for output in outputs) == 30
    assert sequence.finish_reason is FinishReason.LENGTH


def test_a_perfect_draft_is_accepted_in_every_round_and_saves_target_passes() -> None:
    sequence = make_sequence(max_tokens=20, k=4)
    outputs = run(sequence, ScriptedProposer(perfect), ScriptedVerifier(SCRIPT))
    assert [len(output.token_ids) for output in outputs] == [5, 5, 5, 5]
    assert all(output.num_draft_tokens == output.num_accepted for output in outputs)
    assert sequence.stats.num_rounds == 4


def test_an_eos_that_only_the_draft_wants_does_not_end_the_generation() -> None:
    sequence = make_sequence(max_tokens=10)
    run(sequence, ScriptedProposer(eos), ScriptedVerifier(SCRIPT))
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.num_completion_tokens == 10
    assert sequence.stats.num_accepted == 0


def test_without_a_draft_service_each_round_is_plain_decoding_and_no_fallback() -> None:
    sequence = make_sequence(max_tokens=10, k=0)
    outputs = run(sequence, NoDrafts(), ScriptedVerifier(SCRIPT))
    assert [len(output.token_ids) for output in outputs] == [1] * 10
    assert sequence.stats.num_fallback_rounds == 0
    assert sequence.stats.num_draft_tokens_per_pos == []


def test_the_steps_come_in_order_and_both_sessions_are_freed_at_the_end() -> None:
    proposer, verifier = ScriptedProposer(perfect), ScriptedVerifier(SCRIPT)
    verifier.log = proposer.log
    run(make_sequence(max_tokens=6, k=2), proposer, verifier)
    assert proposer.log == ["open", *["propose", "verify"] * 2, "close", "close"]


def test_both_sessions_are_freed_when_the_target_fails() -> None:
    proposer, verifier = ScriptedProposer(perfect), ScriptedVerifier(SCRIPT, fail_at_round=2)
    with pytest.raises(ConnectionError):
        run(make_sequence(), proposer, verifier)
    assert proposer.log[-1] == verifier.log[-1] == "close"


def test_both_sessions_are_freed_when_the_consumer_leaves() -> None:
    proposer, verifier = ScriptedProposer(perfect), ScriptedVerifier(SCRIPT)

    async def leave_early() -> None:
        async with aclosing(speculative_loop.generate(make_sequence(), proposer, verifier)) as rounds:
            async for _ in rounds:
                break

    asyncio.run(leave_early())
    assert proposer.log[-1] == verifier.log[-1] == "close"


def test_both_sessions_are_freed_when_the_task_is_cancelled_during_a_verify() -> None:
    proposer, verifier = ScriptedProposer(perfect), ScriptedVerifier(SCRIPT)

    async def cancelled() -> None:
        reached = asyncio.Event()

        async def hang(*_: object) -> None:
            reached.set()
            await asyncio.Event().wait()

        verifier.verify = hang  # type: ignore[assignment,method-assign]

        async def consume() -> None:
            async with aclosing(speculative_loop.generate(make_sequence(), proposer, verifier)) as rounds:
                async for _ in rounds:
                    pass

        task = asyncio.create_task(consume())
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert proposer.log[-1] == verifier.log[-1] == "close"
