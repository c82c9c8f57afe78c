"""Hidden states at the draft service: in order, each row once, and a typed error for what is missing."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from draft_service.hidden_buffer import HiddenBuffer
from tandem import codec
from tandem.draft.v1 import draft_pb2 as pb
from tandem.types import ErrorCode, HiddenStates, ItemError, Proposal, Stamp
from tests.draft.support import StubProposer, make_spec
from tests.draft.wire import Peer, Running, error_of, open_item, play, proposal_of, propose_item
from tests.hidden import LAYERS, NEED, Reader, rows_in, rows_of
from tests.items import stamp

PROMPT = (1, 2, 3, 4, 5)


def chunk(token_ids: Sequence[int], first: int, end: int) -> HiddenStates:
    """Rows first .. end - 1 of these tokens."""
    rows = rows_of(token_ids)
    return HiddenStates(first, end - first, b"".join(rows[row] for row in range(first, end)))


def feed_item(mark: Stamp, states: HiddenStates) -> pb.ProposeItem:
    return pb.ProposeItem(stamp=codec.stamp_to_proto(mark), hidden_states=codec.hidden_states_to_proto(states))


async def begin(peer: Peer, prompt: Sequence[int] = PROMPT) -> None:
    assert (await peer.ask(open_item(make_spec(prompt)))).WhichOneof("outcome") == "opened"


def test_rows_come_before_their_round_and_reach_the_proposer_once() -> None:
    reader = Reader(StubProposer(Proposal((7,))))

    async def scenario(_: Running, peer: Peer) -> None:
        await begin(peer)
        tokens = list(PROMPT)
        await peer.send(
            feed_item(stamp(tokens, 1), chunk(tokens, 0, 3)), feed_item(stamp(tokens, 1), chunk(tokens, 3, 4))
        )
        assert proposal_of(await peer.ask(propose_item(tokens, 1, len(tokens)))) == Proposal((7,))
        for round_number in range(2, 6):
            known = len(tokens)
            tokens += [7, round_number]
            await peer.send(feed_item(stamp(tokens, round_number), chunk(tokens, known - 1, known + 1)))
            assert proposal_of(await peer.ask(propose_item(tokens, round_number, known))) == Proposal((7,))
            assert sum(states.num_rows for states in reader.batches[-1][0].hidden_states) == 2

    play(scenario, reader)
    assert sum(states.num_rows for states in reader.batches[0][0].hidden_states) == 4


def test_a_round_without_its_rows_is_answered_by_a_typed_error_that_names_the_first() -> None:
    reader = Reader(StubProposer(Proposal((7,))))

    async def scenario(_: Running, peer: Peer) -> None:
        await begin(peer)
        await peer.send(feed_item(stamp(PROMPT, 1), chunk(PROMPT, 0, 3)))
        for _ in range(2):  # and again for a repeat
            code, message = error_of(await peer.ask(propose_item(PROMPT, 1, 5)))
            assert code is ErrorCode.HIDDEN_STATES_MISSING
            assert "those of row 3 are not here" in message
        code, message = error_of(await peer.ask(feed_item(stamp(PROMPT, 2), chunk(PROMPT, 4, 5))))
        assert code is ErrorCode.HIDDEN_STATES_MISSING

    play(scenario, reader)
    assert reader.batches == []


def test_a_proposer_that_has_lost_its_rows_says_so_and_a_new_opening_begins_with_none() -> None:
    reader = Reader(StubProposer(Proposal((7,))))

    async def scenario(_: Running, peer: Peer) -> None:
        await begin(peer)
        await peer.send(feed_item(stamp(PROMPT, 1), chunk(PROMPT, 0, 4)))
        proposal_of(await peer.ask(propose_item(PROMPT, 1, 5)))
        tokens = (*PROMPT, 7)
        reader.lose()
        await peer.send(feed_item(stamp(tokens, 2), chunk(tokens, 4, 5)))
        assert error_of(await peer.ask(propose_item(tokens, 2, 5)))[0] is ErrorCode.HIDDEN_STATES_MISSING
        spec = replace(make_spec(PROMPT), token_ids=tokens)
        await peer.ask(open_item(spec, epoch=2))
        await peer.send(feed_item(stamp(tokens, 3, epoch=2), chunk(tokens, 0, 5)))
        assert proposal_of(await peer.ask(propose_item(tokens, 3, 6, epoch=2))) == Proposal((7,))

    play(scenario, reader)


def test_other_tokens_take_their_rows_with_them_and_the_same_tokens_keep_them() -> None:
    reader = Reader(StubProposer(Proposal((7,))))

    async def scenario(_: Running, peer: Peer) -> None:
        await begin(peer)
        tokens = (*PROMPT, 7, 8)
        await peer.send(feed_item(stamp(tokens, 1), chunk(tokens, 0, 6)))
        proposal_of(await peer.ask(propose_item(tokens, 1, 5)))
        longer = (*tokens, 9)
        await peer.send(feed_item(stamp(longer, 2), chunk(longer, 6, 7)))
        proposal_of(await peer.ask(propose_item(longer, 2, 5)))  # says 7 and 8 once more
        other = (*PROMPT, 7, 6, 5)
        assert error_of(await peer.ask(propose_item(other, 3, 5)))[0] is ErrorCode.HIDDEN_STATES_MISSING

    play(scenario, reader)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (HiddenStates(0, 2, bytes(32)), "2 rows of 32 bytes, this proposer needs 32 bytes a row"),
        (HiddenStates(67, 2, bytes(64)), r"row 68 is outside 0..67 \(one less than prompt"),
    ],
)
def test_rows_that_cannot_be_are_refused(states: HiddenStates, message: str) -> None:
    async def scenario(_: Running, peer: Peer) -> None:
        await begin(peer)
        code, text = error_of(await peer.ask(feed_item(stamp(PROMPT, 1), states)))
        assert code is ErrorCode.INVALID_ARGUMENT
        with pytest.raises(ItemError, match=message):
            raise ItemError(code, text)

    play(scenario, Reader(StubProposer()))


def test_a_proposer_that_needs_none_refuses_them_by_name() -> None:
    async def scenario(server: Running, peer: Peer) -> None:
        await begin(peer)
        code, text = error_of(await peer.ask(feed_item(stamp(PROMPT, 1), chunk(PROMPT, 0, 4))))
        assert (code, text) == (ErrorCode.INVALID_ARGUMENT, "hidden_states: proposer 'stub' needs none")
        info = await server.stub.GetInfo(pb.GetInfoRequest())
        assert (info.needs_hidden_states, list(info.hidden_layers)) == (False, [])

    play(scenario, StubProposer())


def test_the_handshake_says_which_are_needed() -> None:
    async def scenario(server: Running, _: Peer) -> None:
        info = await server.stub.GetInfo(pb.GetInfoRequest())
        assert (info.needs_hidden_states, tuple(info.hidden_layers), info.hidden_size) == (True, LAYERS, 8)

    play(scenario, Reader(StubProposer()))


def test_the_buffer_keeps_what_is_not_taken_up_and_drops_what_is_other_tokens() -> None:
    buffer, tokens = HiddenBuffer(), tuple(range(12))
    buffer.add(chunk(tokens, 0, 5), NEED.row_bytes)
    buffer.add(chunk(tokens, 3, 8), NEED.row_bytes)  # overlaps
    buffer.add(chunk(tokens, 2, 4), NEED.row_bytes)  # has come
    assert rows_in(buffer.chunks) == {row: data for row, data in rows_of(tokens).items() if row < 8}
    assert sum(states.num_rows for states in buffer.chunks) == 8
    buffer.take_up(6)
    assert sorted(rows_in(buffer.chunks)) == [6, 7]
    buffer.truncate(7)
    assert sorted(rows_in(buffer.chunks)) == [6]
    assert buffer.lacks(7) is None
    assert buffer.lacks(8) is not None
    buffer.truncate(4)  # below what was taken up
    buffer.add(chunk(tokens, 4, 6), NEED.row_bytes)
    assert sorted(rows_in(buffer.chunks)) == [4, 5]
