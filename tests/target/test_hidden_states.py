"""Hidden states of committed rows: sent before the verdict that commits them, each row's own, and again on demand."""

from dataclasses import replace

import pytest

from tandem import codec
from tandem.serving.items import Closed, Opened, Replayed
from tandem.target.v1 import target_pb2
from tandem.types import ErrorCode, HiddenStates, ItemError, SessionSpec, Stamp, Verdict
from target_service.hidden_rows import MAX_CHUNK_BYTES
from target_service.limits import Limits
from target_service.sessions import Session
from tests.hidden import LAYERS, rows_in, rows_of
from tests.target.harness import STREAM, Bench, plain_decode, spec, stamp, toy

PROMPT = tuple(range(1, 12))
SESSION = spec(PROMPT, 20)


def right_and_wrong_drafts(tokens: list[int], num_right: int) -> list[int]:
    """Drafts of which so many will be accepted, and one that will not."""
    right = plain_decode(replace(SESSION, token_ids=tuple(tokens)), most=num_right + 1)
    return [*right[:num_right], (right[num_right] + 1) % 32] if len(right) > num_right else right


def run_to_the_end(bench: Bench, session_id: int = 1, session: SessionSpec = SESSION) -> list[int]:
    """Rounds with 0, 1, 2 accepted drafts in turn -> all tokens; what is sent with each is looked at."""
    assert bench.open(session, session_id, hidden_layers=LAYERS) == Opened()
    tokens, round_number, is_over = list(session.token_ids), 0, False
    while not is_over:
        drafts = right_and_wrong_drafts(tokens, round_number % 3)
        round_number += 1
        verdict = bench.round(tokens, round_number, drafts, session=session_id)
        is_over = verdict.finish_reason is not None
        last = max(chunk.end_row for chunk in bench.hidden_states(session_id))
        assert last == len(tokens) - 1  # rows of rejected drafts are nobody's, the last token has none yet
    return tokens


@pytest.mark.parametrize("step_tokens", [512, 6])
def test_every_committed_row_is_sent_before_its_verdict_whatever_the_chunks(step_tokens: int) -> None:
    bench = Bench(toy(), Limits(max_step_tokens=step_tokens, max_draft_tokens=4))
    tokens = run_to_the_end(bench)
    assert tokens[len(PROMPT) :] == plain_decode(SESSION)
    sent = rows_in(bench.hidden_states())
    assert sent == {row: data for row, data in rows_of(tokens).items() if row < len(tokens) - 1}
    kinds = [type(answer.outcome) for _, answer in bench.answers[1:]]
    assert kinds[-2:] == [HiddenStates, Verdict]
    assert kinds.count(Verdict) > 5


def test_a_session_that_did_not_ask_gets_none_beside_one_that_did() -> None:
    bench = Bench()
    bench.open(SESSION, 1, hidden_layers=(2,))
    bench.open(SESSION, 2)
    bench.open(spec((5, 6, 7), 20), 3, hidden_layers=LAYERS)
    for number, tokens in ((1, PROMPT), (2, PROMPT), (3, (5, 6, 7))):
        bench.submit(stamp(tokens, 1, number))
    assert bench.step() == 3
    assert rows_in(bench.hidden_states(1)) == {r: d for r, d in rows_of(PROMPT, (2,)).items() if r < len(PROMPT)}
    assert bench.hidden_states(2) == []
    assert rows_in(bench.hidden_states(3)) == rows_of((5, 6, 7))


def test_a_repeated_round_repeats_the_verdict_and_nothing_else() -> None:
    bench = Bench()
    bench.open(SESSION, hidden_layers=LAYERS)
    tokens = list(PROMPT)
    verdict = bench.round(tokens, 1)
    num_sent = len(bench.hidden_states())
    assert bench.submit(stamp(PROMPT, 1)) == verdict
    assert len(bench.hidden_states()) == num_sent


def test_rows_found_in_the_prefix_cache_are_not_sent_until_a_replay_computes_them() -> None:
    bench = Bench(toy(prefix_cache=True))
    for session_id in (1, 2):
        tokens = run_to_the_end(bench, session_id)
    sent = rows_in(bench.hidden_states(2))
    assert min(sent) == 8  # two blocks of the prompt were found
    assert bench.replay(tokens, 3) is None
    answers = bench.settle()
    assert answers[-1].outcome == Replayed()
    assert answers[-1].stamp == stamp(tokens, 0, 3)
    assert rows_in(bench.hidden_states(3)) == {r: d for r, d in rows_of(tokens).items() if r < len(tokens) - 1}
    bench.settle()
    assert len(bench.table) == 2


def test_a_replay_from_a_row_on_may_find_the_rows_before_it() -> None:
    bench = Bench(toy(prefix_cache=True))
    tokens = run_to_the_end(bench)
    num_computed = sum(call.num_tokens for call in bench.engine.calls)
    bench.replay(tokens, 2, first_row=21)
    bench.settle()
    assert sorted(rows_in(bench.hidden_states(2))) == list(range(21, len(tokens) - 1))
    assert sum(call.num_tokens for call in bench.engine.calls) - num_computed == len(tokens) - 1 - 20


def test_a_replay_comes_behind_every_prompt_and_takes_little_beside_rounds() -> None:
    bench = Bench(toy(), Limits(max_step_tokens=32, max_prefill_tokens=16))
    long = tuple(index % 30 for index in range(100))
    bench.replay(long, 9)
    bench.open(SESSION, 1)
    bench.open(spec(long, 4), 2)
    bench.submit(stamp(PROMPT, 1, 1))
    bench.submit(stamp(long, 1, 2))
    while not any(isinstance(a.outcome, Verdict) and a.stamp.session_id == 2 for _, a in bench.answers):
        assert bench.step() > 0
        assert bench.hidden_states(9) == []
    bench.step()
    (chunk,) = bench.hidden_states(9)
    assert chunk.num_rows == 4  # of 16 that a prompt would have had: others decode
    tokens = list(PROMPT)
    tokens += next(a.outcome.token_ids for _, a in bench.answers if isinstance(a.outcome, Verdict))
    bench.submit(stamp(tokens, 2, 1))
    bench.step()
    assert isinstance(bench.answers[-1][1].outcome, Verdict | HiddenStates)
    assert any(isinstance(a.outcome, Verdict) and a.stamp.round == 2 for _, a in bench.answers)


def test_a_replay_gives_its_memory_to_anybody_and_goes_on_where_it_was() -> None:
    bench = Bench(toy(num_blocks=9), Limits(max_step_tokens=8, max_draft_tokens=0))
    long = tuple(index % 30 for index in range(31))  # 8 blocks
    bench.replay(long, 9)
    for _ in range(3):
        bench.step()
    assert len(rows_in(bench.hidden_states(9))) == 24
    other, tokens = spec((3,) * 9, 12, priority=-100), [3] * 9
    assert bench.open(other, 1) is None  # there is no room
    bench.settle()
    for round_number in range(1, 13):
        bench.round(tokens, round_number)
    assert tokens[9:] == plain_decode(other)
    assert len(rows_in(bench.hidden_states(9))) == 24
    bench.close(stamp(tokens, 0, 1))
    assert Replayed() in [answer.outcome for answer in bench.settle()]
    assert rows_in(bench.hidden_states(9)) == {row: data for row, data in rows_of(long).items() if row < 30}
    assert sum(chunk.num_rows for chunk in bench.hidden_states(9)) == 30  # none twice
    bench.settle()
    assert bench.used_blocks() == 0


def test_replays_do_not_take_their_memory_from_each_other() -> None:
    bench = Bench(toy(num_blocks=9), Limits(max_step_tokens=8, max_draft_tokens=0))
    long = tuple(index % 30 for index in range(31))
    for number in (1, 2):
        bench.replay(long, number)
    replayed = [answer.stamp.session_id for answer in bench.settle() if answer.outcome == Replayed()]
    assert replayed == [1, 2]
    assert bench.table.load().preemptions == 0


@pytest.mark.parametrize(
    ("token_ids", "layers", "first_row", "message"),
    [
        ((1,), LAYERS, 0, r"replay.token_ids: 1 tokens are outside 2..513"),
        ((1, 32), LAYERS, 0, r"replay.token_ids\[1\]: token id 32 is outside 0..31"),
        ((1, 2), (), 0, "replay.hidden_layers: are missing"),
        ((1, 2), (3, 1), 0, r"hidden_layers: \[3, 1\] must be at most 8, ascending in 1..3"),
        ((1, 2), (4,), 0, r"hidden_layers: \[4\] must be at most 8, ascending in 1..3"),
        ((1, 2), LAYERS, 1, "replay.first_row: 1 is outside 0..0"),
    ],
)
def test_a_replay_that_cannot_be_is_refused(
    token_ids: tuple[int, ...], layers: tuple[int, ...], first_row: int, message: str
) -> None:
    bench = Bench()
    error = bench.replay(token_ids, 1, first_row, layers)
    assert isinstance(error, ItemError)
    assert error.code is ErrorCode.INVALID_ARGUMENT
    with pytest.raises(ItemError, match=message):
        raise error
    assert len(bench.table) == 0


def test_an_open_for_layers_that_are_not_there_is_refused_and_so_is_a_round_of_a_replay() -> None:
    bench = Bench()
    error = bench.open(SESSION, hidden_layers=(4,))
    assert isinstance(error, ItemError)
    bench.replay(PROMPT, 2)
    error = bench.submit(stamp(PROMPT, 1, 2))
    assert isinstance(error, ItemError)
    assert error.code is ErrorCode.UNKNOWN_SESSION


def test_a_replay_is_answered_when_its_step_fails_and_freed_when_it_is_closed() -> None:
    bench = Bench(limits=Limits(max_step_tokens=5, max_draft_tokens=0))
    bench.replay(PROMPT, 1)
    bench.step()
    assert bench.close(stamp(PROMPT, 0, 1)) is None
    assert bench.settle()[-1].outcome == Closed()
    bench.replay(PROMPT, 2)
    plan = bench.table.plan_step(0.0)
    assert plan is not None
    bench.table.fail(bench.engine.kv_usage(), ())
    (answer,) = [answer for _, answer in bench.answers if answer.stamp.session_id == 2]
    assert isinstance(answer.outcome, ItemError)
    assert len(bench.table) == 0


def test_chunks_stay_below_what_a_message_holds() -> None:
    bench = Bench(toy(num_blocks=8192, max_context=32000), Limits(max_step_tokens=32000))
    long = tuple(index % 30 for index in range(31000))
    bench.replay(long, 1)
    bench.settle()
    chunks = bench.hidden_states(1)
    assert len(chunks) > 1
    assert max(len(chunk.data) for chunk in chunks) <= MAX_CHUNK_BYTES
    assert [chunk.first_row for chunk in chunks[1:]] == [chunk.end_row for chunk in chunks[:-1]]
    assert chunks[-1].end_row == len(long) - 1


def test_they_travel_as_they_are() -> None:
    states = HiddenStates(7, 2, bytes(range(64)))
    message = codec.hidden_states_to_proto(states)
    assert codec.hidden_states_from_proto(message) == states
    assert states.rows_from(8) == HiddenStates(8, 1, bytes(range(32, 64)))
    for num_rows in (0, 3):
        message.num_rows = num_rows
        with pytest.raises(ItemError, match=f"64 bytes are not {num_rows} rows"):
            codec.hidden_states_from_proto(message)
    item = target_pb2.VerifyItem(hidden_layers=LAYERS)
    assert tuple(item.hidden_layers) == LAYERS
    assert Session((STREAM, Stamp(1, 1, 0, 0, 0).session_id), 1, SESSION, 0).hidden_layers == ()
