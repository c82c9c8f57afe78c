"""The stream over real gRPC: stamps, idempotent rounds, re-opens, batches, bad items, ends."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from draft_service.proposers.base import Proposer
from draft_service.proposers.draft_model import DraftModelProposer
from draft_service.proposers.ngram import NgramProposer
from draft_service.service import DraftLimits
from engine.backends.toy_backend import ToyEngine, hashed_logits
from tandem import codec
from tandem.common.v1 import common_pb2
from tandem.draft.v1 import draft_pb2 as pb
from tandem.prompt_lookup import PromptLookup
from tandem.types import DraftProbsTransport, ErrorCode, ItemError, Proposal
from tests.draft.support import VOCAB, StubProposer, make_spec
from tests.draft.wire import (
    Peer,
    Running,
    close_item,
    error_of,
    open_item,
    play,
    proposal_of,
    propose_item,
)

PROMPT = (1, 2, 3)


def toy_proposer() -> tuple[DraftModelProposer, ToyEngine]:
    toy = ToyEngine(hashed_logits(VOCAB), VOCAB, block_size=4)
    return DraftModelProposer(toy), toy


async def settled(condition: Callable[[], bool]) -> None:
    """Let the loop turn until the condition holds; `play` bounds the wait."""
    while not condition():
        await asyncio.sleep(0.001)


def test_an_open_is_answered_and_a_round_gets_the_proposers_drafts_with_its_own_stamp() -> None:
    proposer = StubProposer(Proposal((4, 5)))

    async def scenario(server: Running, peer: Peer) -> None:
        opened = await peer.ask(open_item(make_spec(PROMPT)))
        assert opened.WhichOneof("outcome") == "opened"
        assert peer.last_response.load.running == 1
        item = propose_item((1, 2, 3, 8), 1, tail_start=3)
        answer = await peer.ask(item)
        assert answer.stamp == item.stamp
        assert proposal_of(answer) == Proposal((4, 5))
        assert proposer.batches[0][0].committed_token_ids == (1, 2, 3, 8)

    play(scenario, proposer)


def test_a_repeated_round_gets_the_recorded_answer_and_an_older_one_is_dropped_and_counted() -> None:
    proposer = StubProposer(Proposal((4, 5)))

    async def scenario(server: Running, peer: Peer) -> None:
        await peer.ask(open_item(make_spec(PROMPT)))
        await peer.ask(propose_item((1, 2, 3, 8), 1, 3))
        second = propose_item((1, 2, 3, 8, 9), 2, 4)
        first_answer = await peer.ask(second)
        proposer.proposal = Proposal((6, 7))
        assert proposal_of(await peer.ask(second)) == proposal_of(first_answer) == Proposal((4, 5))
        await peer.send(propose_item((1, 2, 3, 8), 1, 3))
        closed = await peer.ask(close_item())
        assert closed.WhichOneof("outcome") == "closed"
        assert peer.last_response.load.stale_items == 1
        assert len(proposer.batches) == 2

    play(scenario, proposer)


@pytest.mark.parametrize(
    "tokens", [(1, 2, 3, 9), (1, 2, 3), (1, 2, 3, 8, 4)], ids=["other tokens", "fewer", "its own drafts"]
)
def test_a_repeat_that_was_made_for_other_tokens_than_the_answer_is_a_mismatch(tokens: tuple[int, ...]) -> None:
    proposer = StubProposer(Proposal((4, 5)))

    async def scenario(server: Running, peer: Peer) -> None:
        await peer.ask(open_item(make_spec(PROMPT)))
        first = propose_item((1, 2, 3, 8), 1, 3)
        await peer.ask(first)
        code, _ = error_of(await peer.ask(propose_item(tokens, 1, 3)))
        assert code is ErrorCode.PREFIX_MISMATCH
        assert proposal_of(await peer.ask(first)) == Proposal((4, 5))
        proposal_of(await peer.ask(propose_item((1, 2, 3, 8, 4), 2, 4)))
        assert len(proposer.batches) == 2

    play(scenario, proposer)


def test_a_repeat_of_a_round_in_work_gets_one_answer_and_a_newer_round_replaces_it() -> None:
    proposer = StubProposer()
    proposer.gate.clear()

    async def scenario(server: Running, peer: Peer) -> None:
        await peer.ask(open_item(make_spec(PROMPT)))
        first = propose_item(PROMPT, 1, 3)
        await peer.send(first)
        await settled(lambda: proposer.started.acquire(blocking=False))
        await peer.send(first, propose_item((1, 2, 3, 8), 2, 3))
        await settled(lambda: server.service.batcher.num_waiting == 1)
        proposer.gate.set()
        answer = await peer.receive()
        assert answer.stamp.round == 2
        await peer.ask(close_item())
        assert peer.last_response.load.stale_items == 1  # round 1, overtaken while it was worked on

    play(scenario, proposer)


def test_tokens_go_back_to_the_stamp_however_far_and_mismatches_change_nothing() -> None:
    proposer = StubProposer()

    async def scenario(server: Running, peer: Peer) -> None:
        await peer.ask(open_item(make_spec(PROMPT)))
        await peer.ask(propose_item((1, 2, 3, 8, 9, 10), 1, 3))
        await peer.ask(propose_item((1, 2, 3, 8, 11), 2, 4))
        assert list(proposer.batches[-1][0].committed_token_ids) == [1, 2, 3, 8, 11]
        code, message = error_of(await peer.ask(propose_item((1, 2, 3, 9, 11, 12), 3, 5)))
        assert code is ErrorCode.PREFIX_MISMATCH
        assert "hash" in message
        code, _ = error_of(await peer.ask(propose_item((1, 2, 3, 8, 11, 12, 13), 3, 6)))
        assert code is ErrorCode.PREFIX_MISMATCH
        proposal_of(await peer.ask(propose_item((1, 2, 3, 8, 11, 12), 3, 5)))
        assert list(proposer.batches[-1][0].committed_token_ids) == [1, 2, 3, 8, 11, 12]

    play(scenario, proposer)


def test_reopening_frees_the_old_state_and_older_epochs_are_stale() -> None:
    proposer = StubProposer()

    async def scenario(server: Running, peer: Peer) -> None:
        spec = make_spec(PROMPT)
        await peer.ask(open_item(spec))
        await peer.ask(open_item(spec))  # the same epoch again
        await peer.ask(propose_item(PROMPT, 1, 3))
        longer = replace(spec, token_ids=(1, 2, 3, 8))
        await peer.ask(open_item(longer, epoch=2))
        await peer.send(open_item(spec), propose_item(PROMPT, 2, 3), close_item())
        proposal_of(await peer.ask(propose_item((1, 2, 3, 8), 2, 4, epoch=2)))
        assert proposer.forgotten == [proposer.batches[0][0].session_key]
        assert server.service.load.stale_items == 3
        code, message = error_of(await peer.ask(propose_item((1, 2, 3, 8), 3, 4, epoch=3)))
        assert code is ErrorCode.UNKNOWN_SESSION
        assert "epoch 3" in message

    play(scenario, proposer)


def test_bad_items_are_errors_of_their_own_and_the_stream_goes_on() -> None:
    async def scenario(server: Running, peer: Peer) -> None:
        spec = make_spec(PROMPT)
        tree = open_item(spec)
        tree.open.draft_probs_transport = common_pb2.DRAFT_PROBS_TRANSPORT_FULL
        empty = open_item(spec)
        empty.open.token_ids.clear()
        outside = open_item(make_spec((1, VOCAB)))
        hot = open_item(spec)
        hot.open.sampling.temperature = -1.0
        wrong_tail = propose_item((1, 2, 3, 8), 1, 3)
        wrong_tail.propose.tail_start = 2
        lost = propose_item(PROMPT, 1, 3, session=99)
        await peer.ask(open_item(spec))
        expected = [
            (pb.ProposeItem(), ErrorCode.INVALID_ARGUMENT, "item.op"),
            (tree, ErrorCode.UNIMPLEMENTED, "draft_probs_transport"),
            (empty, ErrorCode.INVALID_ARGUMENT, "prompt"),
            (outside, ErrorCode.INVALID_ARGUMENT, f"outside 0..{VOCAB - 1}"),
            (hot, ErrorCode.INVALID_ARGUMENT, "sampling.temperature"),
            (wrong_tail, ErrorCode.INVALID_ARGUMENT, "propose.tail_start"),
            (lost, ErrorCode.UNKNOWN_SESSION, "session 99"),
            (propose_item((1, 2, 3, VOCAB), 1, 3), ErrorCode.INVALID_ARGUMENT, "committed_token_ids[0]"),
            (propose_item(PROMPT, 0, 3), ErrorCode.INVALID_ARGUMENT, "stamp.round"),
            (propose_item((1, 2), 1, 2), ErrorCode.INVALID_ARGUMENT, "stamp.committed_len"),
        ]
        await peer.send(*(item for item, _, _ in expected))
        for item, code, words in expected:
            result = await peer.receive()
            assert result.stamp == item.stamp
            assert error_of(result)[0] is code
            assert words in error_of(result)[1]
        proposal_of(await peer.ask(propose_item((1, 2, 3, 8), 1, 3)))

    play(scenario, StubProposer(vocab_size=VOCAB))


def test_a_transport_that_the_proposer_cannot_serve_is_refused_naming_what_it_can() -> None:
    async def scenario(server: Running, peer: Peer) -> None:
        sparse = make_spec(PROMPT, transport=DraftProbsTransport.SPARSE)
        code, message = error_of(await peer.ask(open_item(sparse)))
        assert code is ErrorCode.UNIMPLEMENTED
        assert "'sparse' is not served by proposer 'ngram'; it serves: coupled, one_hot" in message

    play(scenario, NgramProposer(PromptLookup()))


def test_what_waits_while_the_proposer_works_is_one_batch() -> None:
    proposer = StubProposer()
    proposer.gate.clear()

    async def scenario(server: Running, peer: Peer) -> None:
        for session in range(1, 6):
            await peer.ask(open_item(make_spec(PROMPT), session=session))
        await peer.send(propose_item(PROMPT, 1, 3, session=1))
        await settled(lambda: proposer.started.acquire(blocking=False))
        for session in range(2, 6):
            await peer.send(propose_item(PROMPT, 1, 3, session=session))
        await settled(lambda: server.service.batcher.num_waiting == 4)
        proposer.gate.set()
        answers = [await peer.receive() for _ in range(5)]
        assert [answer.stamp.session_id for answer in answers] == [1, 2, 3, 4, 5]
        assert [len(batch) for batch in proposer.batches] == [1, 4]

    play(scenario, proposer)


@pytest.mark.parametrize(
    ("num_committed", "num_wanted", "expected"), [(0, 9, 4), (0, 2, 2), (4, 9, 3), (6, 9, 1), (7, 9, 0), (8, 9, 0)]
)
def test_drafts_are_clamped_to_what_was_asked_what_is_left_and_the_services_limit(
    num_committed: int, num_wanted: int, expected: int
) -> None:
    proposer = StubProposer(Proposal(()))

    async def scenario(server: Running, peer: Peer) -> None:
        await peer.ask(open_item(make_spec(PROMPT, max_tokens=8)))
        tokens = (*PROMPT, *range(num_committed))
        assert proposal_of(await peer.ask(propose_item(tokens, 1, 3, num_wanted))) == Proposal()
        asked = [item.num_draft_tokens for batch in proposer.batches for item in batch]
        assert asked == ([expected] if expected else [])

    play(scenario, proposer, DraftLimits(max_draft_tokens=4))


def test_an_exception_of_the_proposer_costs_its_batch_the_drafts_and_nothing_else() -> None:
    proposer = StubProposer(Proposal((4, 5)))
    proposer.error = RuntimeError("secret")

    async def scenario(server: Running, peer: Peer) -> None:
        await peer.ask(open_item(make_spec(PROMPT)))
        failed = await peer.ask(propose_item(PROMPT, 1, 3))
        assert error_of(failed) == (ErrorCode.INTERNAL, "internal error")
        assert proposer.forgotten == [proposer.batches[0][0].session_key]
        proposer.error = None
        assert proposal_of(await peer.ask(propose_item((1, 2, 3, 8), 2, 3))) == Proposal((4, 5))

    play(scenario, proposer)


def test_a_round_whose_deadline_passed_in_the_queue_is_not_drafted() -> None:
    proposer = StubProposer()
    proposer.gate.clear()

    async def scenario(server: Running, peer: Peer) -> None:
        for session in (1, 2):
            await peer.ask(open_item(make_spec(PROMPT), session=session))
        await peer.send(propose_item(PROMPT, 1, 3, session=1))
        await settled(lambda: proposer.started.acquire(blocking=False))
        late = propose_item(PROMPT, 1, 3, session=2)
        late.deadline_ms = 1
        await peer.send(late)
        await settled(lambda: server.service.batcher.num_waiting == 1)
        passed = asyncio.get_running_loop().time() + 0.002
        await settled(lambda: asyncio.get_running_loop().time() > passed)
        proposer.gate.set()
        results = {result.stamp.session_id: result for result in [await peer.receive(), await peer.receive()]}
        proposal_of(results[1])
        assert error_of(results[2])[0] is ErrorCode.DEADLINE_EXCEEDED
        assert len(proposer.batches) == 1

    play(scenario, proposer)


def test_more_sessions_than_the_limit_are_refused_until_one_closes() -> None:
    async def scenario(server: Running, peer: Peer) -> None:
        await peer.ask(open_item(make_spec(PROMPT), session=1))
        code, message = error_of(await peer.ask(open_item(make_spec(PROMPT), session=2)))
        assert code is ErrorCode.NO_CAPACITY
        assert "1 sessions" in message
        await peer.ask(open_item(make_spec(PROMPT), session=1, epoch=2))
        await peer.ask(close_item(session=1, epoch=2))
        opened = await peer.ask(open_item(make_spec(PROMPT), session=2))
        assert opened.WhichOneof("outcome") == "opened"

    play(scenario, StubProposer(), DraftLimits(max_sessions=1))


def test_a_flood_of_opens_costs_the_session_that_is_there_nothing() -> None:
    proposer = StubProposer(Proposal((4, 5)))

    async def scenario(server: Running, peer: Peer) -> None:
        await peer.ask(open_item(make_spec(PROMPT), session=1))
        for round_number in range(1, 4):
            opens = [open_item(make_spec(PROMPT), session=100 * round_number + number) for number in range(50)]
            await peer.send(*opens, propose_item(PROMPT, round_number, 3, session=1))
            results = [await peer.receive() for _ in range(51)]
            drafted = [result for result in results if result.stamp.session_id == 1]
            assert [proposal_of(result) for result in drafted] == [Proposal((4, 5))]
            codes = {error_of(result)[0] for result in results if result.stamp.session_id != 1}
            assert codes == {ErrorCode.NO_CAPACITY}
            assert server.service.num_sessions == 1
        assert [len(batch) for batch in proposer.batches] == [1, 1, 1]

    play(scenario, proposer, DraftLimits(max_sessions=1))


@pytest.mark.parametrize("ending", ["cancel", "half-close"])
def test_the_end_of_a_stream_frees_its_sessions_and_blocks_and_leaves_other_streams_alone(ending: str) -> None:
    proposer, toy = toy_proposer()

    async def scenario(server: Running, peer: Peer) -> None:
        other = Peer(server.stub.Propose())
        for one in (peer, other):
            await one.ask(open_item(make_spec(PROMPT)))  # the same session id: streams are apart
            proposal_of(await one.ask(propose_item(PROMPT, 1, 3)))
        assert server.service.num_sessions == 2
        used = toy.kv_usage().used_blocks
        assert peer.last_response.load.total_blocks == toy.kv_usage().total_blocks
        if ending == "cancel":
            other.call.cancel()
        else:
            await other.call.done_writing()
            assert (await other.call.code()).name == "OK"
        await settled(lambda: server.service.num_sessions == 1 and toy.kv_usage().used_blocks < used)
        proposal_of(await peer.ask(propose_item((1, 2, 3, 8), 2, 3)))
        await peer.ask(close_item())
        await settled(lambda: server.service.load.used_blocks == 0)

    play(scenario, proposer)


def test_a_close_while_a_round_is_worked_on_frees_what_the_round_took() -> None:
    proposer, toy = toy_proposer()
    toy.step_delay_s = 0.02

    async def scenario(server: Running, peer: Peer) -> None:
        await peer.ask(open_item(make_spec(PROMPT)))
        await peer.send(propose_item(PROMPT, 1, 3))
        await settled(lambda: toy.kv_usage().used_blocks > 0)
        closed = await peer.ask(close_item())
        assert closed.WhichOneof("outcome") == "closed"
        await settled(lambda: toy.kv_usage().used_blocks == 0)
        assert peer.results == []

    play(scenario, proposer)


def test_draining_says_so_waits_for_open_sessions_and_ends_streams_with_ok() -> None:
    async def scenario(server: Running, peer: Peer) -> None:
        await peer.ask(open_item(make_spec(PROMPT)))
        draining = asyncio.create_task(server.service.drain(10))
        await settled(lambda: server.service.load.draining)
        proposal_of(await peer.ask(propose_item(PROMPT, 1, 3)))
        assert peer.last_response.load.draining
        assert not draining.done()
        await peer.ask(close_item())
        await draining
        assert (await peer.call.code()).name == "OK"

    play(scenario, StubProposer())


def test_no_session_is_opened_while_draining_and_a_repeat_of_an_open_is_still_answered() -> None:
    async def scenario(server: Running, peer: Peer) -> None:
        await peer.ask(open_item(make_spec(PROMPT)))
        draining = asyncio.create_task(server.service.drain(10))
        await settled(lambda: server.service.load.draining)
        code, message = error_of(await peer.ask(open_item(make_spec(PROMPT), session=2)))
        assert code is ErrorCode.NO_CAPACITY
        assert "draining" in message
        assert (await peer.ask(open_item(make_spec(PROMPT)))).WhichOneof("outcome") == "opened"
        await peer.ask(close_item())
        await draining

    play(scenario, StubProposer())


def test_a_peer_that_sends_no_more_still_gets_the_answers_of_rounds_in_work_and_then_the_end() -> None:
    proposer = StubProposer(Proposal((4, 5)))
    proposer.gate.clear()

    async def scenario(server: Running, peer: Peer) -> None:
        await peer.ask(open_item(make_spec(PROMPT)))
        await peer.send(propose_item(PROMPT, 1, 3))
        await settled(lambda: proposer.started.acquire(blocking=False))
        await peer.call.done_writing()
        proposer.gate.set()
        assert proposal_of(await peer.receive()) == Proposal((4, 5))
        assert (await peer.call.code()).name == "OK"
        await settled(lambda: server.service.num_sessions == 0)

    play(scenario, proposer)


def test_idle_sessions_of_a_peer_that_sends_no_more_are_freed_while_a_round_of_it_is_in_work() -> None:
    proposer = StubProposer(Proposal((4, 5)))

    async def scenario(server: Running, peer: Peer) -> None:
        for number in (1, 2, 3):
            await peer.ask(open_item(make_spec(PROMPT), session=number))
        await peer.ask(propose_item(PROMPT, 1, 3, session=1))
        proposer.gate.clear()
        await peer.send(propose_item(PROMPT, 1, 3, session=3))
        await peer.call.done_writing()
        await settled(lambda: server.service.num_sessions == 1)
        proposer.gate.set()
        assert proposal_of(await peer.receive()) == Proposal((4, 5))
        assert (await peer.call.code()).name == "OK"
        assert server.service.num_sessions == 0

    play(scenario, proposer)


@pytest.mark.parametrize("kind", ["ngram", "draft_model"])
def test_get_info_says_what_is_served(kind: str) -> None:
    async def scenario(server: Running, peer: Peer) -> None:
        answer: Any = await server.stub.GetInfo(pb.GetInfoRequest(), timeout=10)
        model = codec.model_info_from_proto(answer.model)
        assert answer.proposer == kind
        assert model.vocab_size == (0 if kind == "ngram" else VOCAB)
        assert model.max_draft_tokens == 16
        names = {codec.transport_from_proto(number).value for number in answer.transports}
        assert names == {"one_hot", "coupled"} | ({"sparse", "full"} if kind == "draft_model" else set())

    proposer: Proposer = NgramProposer(PromptLookup()) if kind == "ngram" else toy_proposer()[0]
    play(scenario, proposer)


def test_the_recorded_answer_of_a_failed_round_is_its_error() -> None:
    proposer = StubProposer()
    proposer.error = ItemError(ErrorCode.INTERNAL, "whatever it says")

    async def scenario(server: Running, peer: Peer) -> None:
        await peer.ask(open_item(make_spec(PROMPT)))
        item = propose_item(PROMPT, 1, 3)
        first, second = await peer.ask(item), await peer.ask(item)
        assert error_of(first) == error_of(second) == (ErrorCode.INTERNAL, "internal error")
        assert len(proposer.batches) == 1

    play(scenario, proposer)
