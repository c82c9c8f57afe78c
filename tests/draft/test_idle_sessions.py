"""Sessions that nobody uses end: after their lease, or for newer ones; whoever comes back is told to open again."""

from collections.abc import Awaitable, Callable

from draft_service.limits import IDLE_S, DraftLimits
from draft_service.proposers.base import Proposer
from draft_service.proposers.draft_model import DraftModelProposer
from engine.backends.toy_backend import ToyEngine, hashed_logits
from tandem.types import ErrorCode, Load
from tests.draft.clock import run_with_clock, settled, skip
from tests.draft.support import VOCAB, StubProposer, make_spec
from tests.draft.wire import Peer, Running, close_item, error_of, open_item, proposal_of, propose_item, running

PROMPT = (1, 2, 3)
LEASE_S = 60.0
LIMITS = DraftLimits(max_sessions=2, session_lease_s=LEASE_S)
Scenario = Callable[[Running, Peer, Peer], Awaitable[None]]


def play(scenario: Scenario, proposer: Proposer | None = None, limits: DraftLimits = LIMITS) -> None:
    """Run a scenario against a server with two streams."""

    async def run() -> None:
        async with running(proposer or StubProposer(), limits) as server:
            peers = Peer(server.stub.Propose()), Peer(server.stub.Propose())
            await scenario(server, *peers)
            for peer in peers:
                peer.call.cancel()

    run_with_clock(run())


async def is_opened(peer: Peer, session: int, epoch: int = 1) -> bool:
    result = await peer.ask(open_item(make_spec(PROMPT), session=session, epoch=epoch))
    if result.WhichOneof("outcome") == "opened":
        return True
    code, message = error_of(result)
    assert code is ErrorCode.NO_CAPACITY
    assert message.startswith("now: 2 sessions are open, the limit of this replica")
    return False


async def has_drafts(peer: Peer, session: int, round_number: int, epoch: int = 1) -> bool:
    """False when the session is unknown."""
    result = await peer.ask(propose_item(PROMPT, round_number, 3, session=session, epoch=epoch))
    if result.WhichOneof("outcome") == "proposal":
        assert proposal_of(result).draft_token_ids
        return True
    assert error_of(result)[0] is ErrorCode.UNKNOWN_SESSION
    return False


def num_ended(server: Running) -> int:
    load: Load = server.service.load
    return load.evicted_sessions


def test_a_session_without_an_item_for_its_lease_is_forgotten_and_its_memory_freed() -> None:
    toy = ToyEngine(hashed_logits(VOCAB), VOCAB)

    async def scenario(server: Running, peer: Peer, other: Peer) -> None:
        assert await is_opened(peer, 1)
        assert await is_opened(other, 1)
        assert await has_drafts(peer, 1, 1)
        skip(LEASE_S - 1)
        assert await has_drafts(other, 1, 1)  # any item renews the lease
        skip(1)
        await settled(lambda: server.service.num_sessions == 1 and toy.kv_usage().used_blocks == 1)
        assert not await has_drafts(peer, 1, 2)
        assert peer.last_response.load.evicted_sessions == 1
        assert await has_drafts(other, 1, 2)
        assert await is_opened(peer, 1, epoch=2)
        assert await has_drafts(peer, 1, 3, epoch=2)

    play(scenario, DraftModelProposer(toy))


def test_a_peer_that_vanished_without_ending_its_stream_holds_nothing_after_the_lease() -> None:
    """FAULTS 21: no "done" ever comes."""
    toy = ToyEngine(hashed_logits(VOCAB), VOCAB)

    async def scenario(server: Running, peer: Peer, other: Peer) -> None:
        assert await is_opened(peer, 1)
        assert await is_opened(peer, 2)
        for session in (1, 2):
            assert await has_drafts(peer, session, 1)
        skip(LEASE_S)
        await settled(lambda: server.service.num_sessions == 0 and toy.kv_usage().used_blocks == 0)
        await server.service.drain(10)  # and is not waited for

    play(scenario, DraftModelProposer(toy))


def test_a_session_whose_round_is_in_work_is_not_idle_however_long_that_takes() -> None:
    proposer = StubProposer()
    proposer.gate.clear()

    async def scenario(server: Running, peer: Peer, other: Peer) -> None:
        assert await is_opened(peer, 1)
        assert await is_opened(peer, 2)
        await peer.send(propose_item(PROMPT, 1, 3, session=1))
        await settled(lambda: proposer.started.acquire(blocking=False))
        skip(LEASE_S)
        await settled(lambda: server.service.num_sessions == 1)
        skip(LEASE_S)
        assert await is_opened(other, 1)  # into session 2's place
        assert not await is_opened(other, 2)
        proposer.gate.set()
        assert proposal_of(await peer.receive()).draft_token_ids
        skip(LEASE_S)
        await settled(lambda: server.service.num_sessions == 0)

    play(scenario, proposer)


def test_an_open_takes_the_place_of_the_session_that_has_been_idle_for_longest_on_whatever_stream() -> None:
    async def scenario(server: Running, peer: Peer, other: Peer) -> None:
        assert await is_opened(peer, 1)
        assert await is_opened(other, 1)
        assert await has_drafts(peer, 1, 1)
        skip(IDLE_S)
        assert await has_drafts(other, 1, 1)
        assert await is_opened(other, 2)
        assert server.service.num_sessions == 2
        assert not await has_drafts(peer, 1, 2)
        assert peer.last_response.load.evicted_sessions == 1
        assert await has_drafts(other, 1, 2)
        assert await has_drafts(other, 2, 1)
        assert (await peer.ask(close_item())).WhichOneof("outcome") == "closed"

    play(scenario)


def test_sessions_in_use_are_not_evicted_by_one_more_than_there_is_room_for() -> None:
    async def scenario(server: Running, peer: Peer, other: Peer) -> None:
        assert await is_opened(peer, 1)
        assert await is_opened(peer, 2)
        for round_number in range(1, 6):
            assert not await is_opened(other, 3)
            for session in (1, 2):
                assert await has_drafts(peer, session, round_number)
            skip(IDLE_S - 0.5)
        assert num_ended(server) == 0

    play(scenario)


def test_an_open_that_is_refused_evicts_nobody() -> None:
    async def scenario(server: Running, peer: Peer, other: Peer) -> None:
        assert await is_opened(peer, 1)
        assert await is_opened(peer, 2)
        skip(IDLE_S)
        wrong = open_item(make_spec(PROMPT), session=3)
        wrong.stamp.prefix_hash += 1
        assert error_of(await peer.ask(wrong))[0] is ErrorCode.PREFIX_MISMATCH
        wrong = open_item(make_spec(PROMPT), session=1, epoch=2)
        wrong.stamp.prefix_hash += 1
        assert error_of(await peer.ask(wrong))[0] is ErrorCode.PREFIX_MISMATCH
        for session in (1, 2):
            assert await has_drafts(peer, session, 1)
        assert num_ended(server) == 0

    play(scenario)


def test_a_session_opened_again_takes_its_own_place() -> None:
    async def scenario(server: Running, peer: Peer, other: Peer) -> None:
        assert await is_opened(peer, 1)
        skip(IDLE_S)
        assert await is_opened(peer, 2)
        assert await is_opened(peer, 2, epoch=2)
        assert await has_drafts(peer, 1, 1)
        assert num_ended(server) == 0

    play(scenario)
