"""Rows of earlier sequences are found by later ones: same text, less to compute, and no more said than is true."""

import pytest

from tandem.serving.items import Closed
from tandem.types import SamplingParams, SessionSpec, Verdict
from target_service.limits import Limits
from tests.target.harness import Bench, plain_decode, spec, stamp, toy
from tests.target.play import Play, play, right_drafts


def cached(num_blocks: int = 256, block_size: int = 4, *, prefix_cache: bool = True) -> Bench:
    return Bench(toy(num_blocks=num_blocks, block_size=block_size, prefix_cache=prefix_cache))


def prompt_of(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + index) % 30 for index in range(length))


def num_computed(bench: Bench) -> int:
    """Rows of all forwards together."""
    return sum(call.num_tokens for call in bench.engine.calls)


def test_a_prompt_of_exactly_whole_blocks_has_its_last_token_computed_and_the_same_text_between_evictions() -> None:
    bench = cached(num_blocks=16)
    session, other = spec(prompt_of(16), 20), spec(prompt_of(44, first=7), 20)
    plain = plain_decode(session)
    found = []
    for number, subject in enumerate((session, session, other, session, session), 1):
        played = play(bench, {number: subject}, right_drafts({number: subject}))
        assert played.outputs[number] == plain_decode(subject)
        found.append({verdict.num_cached_tokens for verdict in played.verdicts[number]})
        if subject is session:
            assert played.outputs[number] == plain
    assert found == [{0}, {12}, {0}, {0}, {12}]
    load = bench.table.load()
    assert (load.hit_blocks, load.used_blocks) == (6, 0)
    assert load.evicted_blocks > 0
    assert load.cached_blocks > 0


def test_the_cached_tokens_of_a_session_are_those_it_began_with_in_every_verdict_even_after_a_preemption() -> None:
    bench = Bench(toy(num_blocks=14, prefix_cache=True), Limits(max_draft_tokens=0))
    play(bench, {9: spec(prompt_of(9), 2)})
    played = Play(bench)
    for number in (1, 2):
        played.begin(spec(prompt_of(9, first=number), 30), number)
    played.run()
    assert bench.table.load().preemptions > 0
    assert [{verdict.num_cached_tokens for verdict in played.verdicts[number]} for number in (1, 2)] == [{8}, {0}]


def test_the_round_that_waits_for_a_cached_prompt_is_decided_by_its_first_step() -> None:
    bench = Bench(toy(prefix_cache=True), Limits(max_step_tokens=17))
    session = spec(prompt_of(100), 4)
    play(bench, {1: session})
    bench.open(session, 2)
    bench.submit(stamp(session.token_ids, 1, 2))
    assert bench.step() == 1
    verdict = bench.answers[-1][1].outcome
    assert isinstance(verdict, Verdict)
    assert (verdict.num_cached_tokens, verdict.batch_rows) == (96, 4)


def answers(count: int, sampling: SamplingParams = SamplingParams(seed=7)) -> dict[int, SessionSpec]:  # noqa: B008
    """As many answers to one prompt of 65 tokens."""
    return {number: spec(prompt_of(65), 8, sampling, sample_index=number) for number in range(1, count + 1)}


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_n_answers_prefill_their_prompt_once_with_the_cache_and_do_not_wait_without(prefix_cache: bool) -> None:
    sessions = answers(4)
    bench = Bench(toy(prefix_cache=prefix_cache), Limits(max_step_tokens=32))
    played = Play(bench)
    for number, session in sessions.items():
        played.begin(session, number)
    assert played.step() == (1 if prefix_cache else 4)
    outputs = played.run()
    assert outputs == {number: plain_decode(session) for number, session in sessions.items()}
    num_prompt_rows = 64 if prefix_cache else 4 * 64
    assert num_computed(bench) == num_prompt_rows + 4 * 8
    assert [played.verdicts[number][0].num_cached_tokens for number in sessions] == (
        [0, 64, 64, 64] if prefix_cache else [0] * 4
    )


@pytest.mark.parametrize("end", ["close", "reopen"])
def test_who_waits_for_the_same_prompt_goes_on_when_the_other_ends(end: str) -> None:
    bench = Bench(toy(num_blocks=24, prefix_cache=True), Limits(max_step_tokens=32, max_draft_tokens=0))
    sessions = answers(2)
    for number, session in sessions.items():
        bench.open(session, number)
        bench.submit(stamp(session.token_ids, 1, number))
    assert [bench.step(), bench.step()] == [1, 1]
    mark = stamp(prompt_of(65), 0, 1)
    if end == "close":
        bench.close(mark)
    else:
        bench.open(sessions[1], 1, epoch=2)
    verdicts = {int(a.stamp.session_id): a.outcome for a in bench.settle() if a.outcome != Closed()}
    assert isinstance(verdicts[2], Verdict)
    assert list(verdicts[2].token_ids) == plain_decode(sessions[2], most=1)
    assert verdicts[2].num_cached_tokens == 64


def test_prompts_too_short_to_share_a_block_do_not_wait_for_each_other() -> None:
    bench = cached()
    for number in (1, 2, 3):
        bench.open(spec(prompt_of(4)), number)
        bench.submit(stamp(prompt_of(4), 1, number))
    assert bench.step() == 3


def test_a_higher_priority_does_not_wait_for_the_same_prompt_of_a_lower_one() -> None:
    bench = Bench(toy(prefix_cache=True), Limits(max_step_tokens=32))
    low, high = spec(prompt_of(65), priority=0), spec(prompt_of(65), priority=1)
    bench.open(low, 1)
    bench.step()
    bench.open(high, 2)
    bench.submit(stamp(prompt_of(65), 1, 2))
    assert bench.step() == 2
    assert bench.engine.num_cached_tokens(bench.engine.sequence_ids[1]) > 32


def test_rows_that_another_shares_are_not_overwritten_by_a_rollback_and_other_tokens() -> None:
    """Session 1 goes back into a full block that session 2 has found, and writes another token there."""
    bench = cached()
    sampling = SamplingParams(seed=3)
    first = spec(prompt_of(11), 20, sampling)
    tokens = list(first.token_ids)
    bench.open(first, 1)
    while len(tokens) < 18:
        bench.round(tokens, len(tokens), session=1)
    second = spec(tokens, 20, SamplingParams(seed=4))
    held = list(tokens)
    bench.open(second, 2)
    assert bench.round(held, 1, session=2).num_cached_tokens == 16
    assert bench.used_blocks() == 5 + 1  # 4 of them are both's
    back = tokens[:14]
    bench.round(back, 99, (29, 29, 29), session=1)
    assert back == tokens[:15]
    rows = [bench.engine.token_ids(sequence_id) for sequence_id in bench.engine.sequence_ids]
    assert rows == [back[:-1], held[:-1]]
    assert bench.used_blocks() == 5 + 1  # a copy of the fourth
