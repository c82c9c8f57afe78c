"""A round that the proposer has not finished waits on and holds up nobody: counted in batches."""

from collections.abc import Awaitable, Callable, Sequence

import pytest

from draft_service.limits import DraftLimits
from draft_service.proposers.base import ProposeInput, Proposer
from draft_service.proposers.draft_model import DraftModelProposer
from draft_service.proposers.model_base import Drafting
from engine.backends.toy_backend import ToyEngine, hashed_logits
from tandem.types import ErrorCode, Proposal
from tests.draft.clock import run_with_clock, settled, skip
from tests.draft.support import VOCAB, StubProposer, make_spec
from tests.draft.wire import Peer, Running, close_item, error_of, open_item, proposal_of, propose_item, running

PROMPT = (1, 2, 3)
LONG = (7,) * 300


def play(
    act: Callable[[Running, Peer], Awaitable[None]], proposer: Proposer, limits: DraftLimits | None = None
) -> None:
    async def main() -> None:
        async with running(proposer, limits or DraftLimits()) as server:
            peer = Peer(server.stub.Propose())
            await act(server, peer)
            peer.call.cancel()

    run_with_clock(main())


async def open_all(peer: Peer, *sessions: int) -> None:
    for session in sessions:
        await peer.ask(open_item(make_spec(PROMPT), session=session))


def test_an_unfinished_round_is_part_of_every_batch_until_it_is_done_and_the_others_are_answered() -> None:
    proposer = StubProposer(Proposal((4, 5)))
    proposer.is_behind = lambda item: item.session_key == 1 and len(proposer.batches) < 4

    async def act(server: Running, peer: Peer) -> None:
        await open_all(peer, 1, 2)
        proposer.gate.clear()
        await peer.send(propose_item(PROMPT, 1, 3, session=1), propose_item(PROMPT, 1, 3, session=2))
        await settled(lambda: server.service.batcher.num_waiting == 0 and proposer.started.acquire(blocking=False))
        proposer.gate.set()
        first, second = await peer.receive(), await peer.receive()
        assert (first.stamp.session_id, second.stamp.session_id) == (2, 1)
        assert proposal_of(first) == proposal_of(second) == Proposal((4, 5))
        assert [[int(item.session_key) for item in batch] for batch in proposer.batches] == [[1, 2], [1], [1], [1]]
        assert all(batch[0] == proposer.batches[0][0] for batch in proposer.batches)

    play(act, proposer)


def test_an_unfinished_round_ends_with_its_deadline_and_the_session_goes_on() -> None:
    proposer = StubProposer(Proposal((4, 5)))
    proposer.is_behind = lambda item: len(item.committed_token_ids) == 3

    async def act(server: Running, peer: Peer) -> None:
        await open_all(peer, 1)
        item = propose_item(PROMPT, 1, 3)
        item.deadline_ms = 60_000
        await peer.send(item)
        await settled(lambda: len(proposer.batches) > 2)
        skip(61)
        assert error_of(await peer.receive())[0] is ErrorCode.DEADLINE_EXCEEDED
        assert proposal_of(await peer.ask(propose_item((*PROMPT, 8), 2, 3))) == Proposal((4, 5))
        assert server.service.batcher.num_waiting == 0

    play(act, proposer)


@pytest.mark.parametrize("change", ["next round", "close"])
def test_an_unfinished_round_that_is_not_wanted_any_more_is_dropped(change: str) -> None:
    proposer = StubProposer(Proposal((4, 5)))
    proposer.is_behind = lambda item: len(item.committed_token_ids) == 3

    async def act(server: Running, peer: Peer) -> None:
        await open_all(peer, 1)
        await peer.send(propose_item(PROMPT, 1, 3))
        await settled(lambda: len(proposer.batches) > 2)
        if change == "close":
            assert (await peer.ask(close_item())).WhichOneof("outcome") == "closed"
        else:
            assert proposal_of(await peer.ask(propose_item((*PROMPT, 8), 2, 3))) == Proposal((4, 5))
        await settled(lambda: server.service.load.stale_items == 1)
        assert peer.results == []
        await settled(lambda: server.service.batcher._worker.done())

    play(act, proposer)


def test_no_batch_has_more_sessions_than_the_limit_and_those_that_waited_longest_come_first() -> None:
    proposer = StubProposer(Proposal((4, 5)))
    proposer.is_behind = lambda item: item.session_key == 2 and len(proposer.batches) < 4

    async def act(server: Running, peer: Peer) -> None:
        await open_all(peer, 1, 2, 3, 4, 5)
        proposer.gate.clear()
        await peer.send(propose_item(PROMPT, 1, 3, session=1))
        await settled(lambda: proposer.started.acquire(blocking=False))
        await peer.send(*(propose_item(PROMPT, 1, 3, session=session) for session in (2, 3, 4, 5)))
        await settled(lambda: server.service.batcher.num_waiting == 4)
        proposer.gate.set()
        answers = [(await peer.receive()).stamp.session_id for _ in range(5)]
        assert answers == [1, 3, 4, 2, 5]
        assert [[int(item.session_key) for item in batch] for batch in proposer.batches] == [
            [1],
            [2, 3],
            [2, 4],
            [2, 5],
        ]

    play(act, proposer, DraftLimits(max_batch=2))


class Recorder(DraftModelProposer):
    """Which sessions each batch had."""

    def __init__(self, engine: ToyEngine, max_step_tokens: int) -> None:
        super().__init__(engine, drafting=Drafting(max_step_tokens))
        self.batches: list[list[int]] = []

    def propose(self, batch: Sequence[ProposeInput]) -> list[Proposal | None]:
        self.batches.append([int(item.session_key) for item in batch])
        return super().propose(batch)


def test_a_long_prompt_costs_the_others_no_batch() -> None:
    toy = ToyEngine(hashed_logits(VOCAB), VOCAB)
    proposer = Recorder(toy, max_step_tokens=16)
    num_rounds = 5

    async def act(server: Running, peer: Peer) -> None:
        await peer.ask(open_item(make_spec(LONG), session=1))
        await open_all(peer, 2, 3)
        await peer.send(propose_item(LONG, 1, len(LONG), session=1))
        long: list[Proposal] = []

        async def answered() -> int:
            result = await peer.receive()
            if result.stamp.session_id == 1:
                long.append(proposal_of(result))
            return int(result.stamp.session_id)

        for round_number in range(1, num_rounds + 1):
            for session in (2, 3):
                await peer.send(propose_item(PROMPT, round_number, 3, session=session))
                while await answered() != session:
                    pass
        while not long:
            await answered()
        assert len(long[0].draft_token_ids) == 2

    play(act, proposer)
    in_batches = [sum(session in batch for batch in proposer.batches) for session in (1, 2, 3)]
    assert in_batches[1:] == [num_rounds, num_rounds]  # each of their rounds was done by the batch it was part of
    assert len(LONG) / 16 <= in_batches[0] <= len(LONG) / 16 + 2 * num_rounds
    assert max(call.num_tokens for call in toy.calls) <= 16
