"""Who gets memory in a step: committed rows by rank, the newest gives way, drafts take what is left."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.base import SequenceId, SequenceInput
from engine.backends.toy_backend import ToyEngine
from engine.sampling.policies import VerifyRows
from tandem.types import Proposal
from target_service.reservation import Grant, Reservation, reserve_speculative
from target_service.step import IdleSequence, StepItem, StepPlan
from tests.target.harness import spec, toy


@pytest.mark.parametrize(
    ("num_drafts", "tokens_left", "free_rows", "granted"),
    [
        (4, 9, 9, 4),
        (4, 5, 9, 4),
        (4, 4, 9, 3),
        (4, 9, 3, 2),
        (4, 9, 1, 0),
        (4, 9, 0, 0),
        (0, 9, 9, 0),
        (4, 0, 9, 0),
    ],
)
def test_drafts_get_what_is_left_beside_the_rounds_own_row(
    num_drafts: int, tokens_left: int, free_rows: int, granted: int
) -> None:
    assert reserve_speculative(num_drafts, tokens_left, free_rows) == granted


def holder(engine: ToyEngine, num_rows: int, first: int = 1) -> SequenceId:
    """A sequence with so many rows."""
    sequence_id = engine.create()
    engine.advance([SequenceInput(sequence_id, [first, *range(2, num_rows + 1)])])
    return sequence_id


def round_of(engine: ToyEngine, sequence_id: SequenceId, rank: int, num_drafts: int = 4) -> StepItem:
    """A round of a sequence that is caught up."""
    num_rows = engine.num_cached_tokens(sequence_id)
    tokens = [*engine.token_ids(sequence_id), 9]
    request = VerifyRows(spec(tokens, 20), tokens, Proposal((5,) * num_drafts))
    return StepItem(sequence_id, num_rows, [9], 1 + num_drafts, request, rank)


def grants(
    engine: ToyEngine, items: Sequence[StepItem], idle: Sequence[IdleSequence] = ()
) -> tuple[list[Grant], list[SequenceId]]:
    reservation = Reservation(engine, StepPlan((), tuple(items), tuple(idle)))
    granted = reservation.grants()
    inputs = [SequenceInput(g.sequence_id, g.appended) for g in granted if g.sequence_id and g.appended]
    assert engine.num_blocks_for(inputs) <= engine.kv_usage().available_blocks
    return granted, reservation.preempted


def num_drafts(grant: Grant) -> int | None:
    """None where the round waits."""
    return len(grant.verify.proposal.draft_token_ids) if grant.verify else None


def test_everything_is_granted_where_it_fits_and_nobody_is_preempted() -> None:
    engine = toy(num_blocks=8)
    items = [round_of(engine, holder(engine, 6), rank) for rank in range(2)]
    granted, preempted = grants(engine, items)
    assert ([num_drafts(grant) for grant in granted], preempted) == ([4, 4], [])


def test_every_rounds_own_row_comes_before_anybodys_drafts() -> None:
    engine = toy(num_blocks=3)
    items = [round_of(engine, holder(engine, 4, rank + 1), rank) for rank in range(2)]
    granted, preempted = grants(engine, items)
    assert ([num_drafts(grant) for grant in granted], preempted) == ([3, None], [])


def test_drafts_use_the_room_in_the_last_block() -> None:
    engine = toy(num_blocks=1)
    granted, _ = grants(engine, [round_of(engine, holder(engine, 1), 0)])
    assert num_drafts(granted[0]) == 2


def test_the_newest_with_rows_gives_way_whether_it_takes_part_or_not() -> None:
    for is_idle in (False, True):
        engine = toy(num_blocks=3)
        oldest, middle, newest = (holder(engine, 4, first) for first in (1, 2, 3))
        items = [round_of(engine, oldest, 0), round_of(engine, middle, 1)]
        idle = [IdleSequence(newest, 2)]
        if not is_idle:
            items, idle = [*items, round_of(engine, newest, 2)], []
        granted, preempted = grants(engine, items, idle)
        assert preempted == [newest]
        assert [num_drafts(grant) for grant in granted] == [3, None, None][: len(items)]
        assert granted[1].sequence_id == middle
        if not is_idle:
            assert granted[2] == Grant()


def test_nobody_is_preempted_for_somebody_of_a_higher_rank_or_for_drafts() -> None:
    engine = toy(num_blocks=2)
    old, new = holder(engine, 4, 1), holder(engine, 4, 2)
    granted, preempted = grants(engine, [round_of(engine, new, 1)], [IdleSequence(old, 0)])
    assert (num_drafts(granted[0]), preempted) == (None, [])
    engine = toy(num_blocks=2)
    old, new = holder(engine, 1, 1), holder(engine, 4, 2)
    granted, preempted = grants(engine, [round_of(engine, old, 0)], [IdleSequence(new, 1)])
    assert (num_drafts(granted[0]), preempted) == (2, [])


def test_a_chunk_of_the_newest_shrinks_to_what_fits_and_that_of_an_older_one_does_not() -> None:
    for rank, other_rank, num_rows, num_preempted in ((1, 0, 8, 0), (0, 1, 10, 1)):
        engine = toy(num_blocks=3)
        other = holder(engine, 4)
        item = StepItem(None, 0, list(range(12)), 10, rank=rank)
        (grant,), preempted = grants(engine, [item], [IdleSequence(other, other_rank)])
        assert (len(grant.token_ids), len(preempted)) == (num_rows, num_preempted)


def test_a_round_whose_missing_rows_do_not_all_fit_prefills_what_does() -> None:
    engine = toy(num_blocks=1)
    request = VerifyRows(spec(range(8)), list(range(8)), Proposal())
    (grant,), _ = grants(engine, [StepItem(None, 0, list(range(8)), 8, request)])
    assert (grant.verify, list(grant.token_ids)) == (None, [0, 1, 2, 3])


def test_a_session_that_cannot_begin_leaves_no_sequence_and_pins_no_cached_block() -> None:
    engine = toy(num_blocks=3, prefix_cache=True)
    engine.release(holder(engine, 8))  # 2 blocks are cached
    old = holder(engine, 4, first=7)
    late = StepItem(None, 0, [*range(1, 9), 30], 9, rank=1)
    (first, second), preempted = grants(engine, [round_of(engine, old, 0), late])
    assert (num_drafts(first), second, preempted) == (4, Grant(), [])
    assert (engine.sequence_ids, engine.kv_usage().cached_blocks) == ([old], 2)


def test_the_last_committed_token_is_left_to_compute_when_all_its_blocks_are_cached() -> None:
    engine = toy(num_blocks=4, prefix_cache=True)
    engine.release(holder(engine, 8))
    tokens = [1, *range(2, 9)]
    request = VerifyRows(spec(tokens), tokens, Proposal((5, 5)))
    (grant,), _ = grants(engine, [StepItem(None, 0, tokens, 32, request)])
    assert (grant.num_found, len(grant.token_ids), num_drafts(grant)) == (4, 4, 2)


def test_a_block_that_somebody_finds_while_its_owner_goes_back_into_it_is_counted_for_both() -> None:
    engine = toy(num_blocks=3, prefix_cache=True)
    old = holder(engine, 8)
    engine.truncate(old, 6)  # its second block can still be found by its 8 tokens
    tokens = [*range(1, 9), 30]
    late = StepItem(None, 0, tokens, 1, VerifyRows(spec(tokens), tokens, Proposal()), rank=1)
    (first, second), _ = grants(engine, [round_of(engine, old, 0, num_drafts=0), late])
    assert (len(first.token_ids), second) == (1, Grant())


def drawn_holder(data: st.DataObject, engine: ToyEngine, prompt: list[int]) -> SequenceId | None:
    """A sequence with the prompt's rows, or fewer after a rollback; None when the pool cannot hold it."""
    sequence_id = engine.create(prompt)
    missing = [SequenceInput(sequence_id, prompt[engine.num_cached_tokens(sequence_id) :])]
    if missing[0].token_ids:
        if engine.num_blocks_for(missing) > engine.kv_usage().available_blocks:
            engine.release(sequence_id)
            return None
        engine.advance(missing)
    engine.truncate(sequence_id, data.draw(st.integers(len(prompt) // 2, len(prompt))))
    return sequence_id


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.data())
def test_whatever_is_granted_fits_and_the_best_rank_is_never_refused(data: st.DataObject) -> None:
    num_blocks, block_size = data.draw(st.integers(4, 14)), data.draw(st.integers(1, 4))
    engine = toy(num_blocks=num_blocks, block_size=block_size, prefix_cache=True)
    items: list[StepItem] = []
    idle: list[IdleSequence] = []
    for rank in range(data.draw(st.integers(1, 5))):
        prompt = [*([1] * data.draw(st.integers(0, 6))), rank + 2, *([3] * data.draw(st.integers(0, 5)))]
        kind, num_proposed = data.draw(st.sampled_from(["new", "round", "idle"])), data.draw(st.integers(0, 4))
        sequence_id = None if kind == "new" else drawn_holder(data, engine, prompt)
        if sequence_id is None:
            request = VerifyRows(spec(prompt), prompt, Proposal((5,) * num_proposed))
            max_rows = data.draw(st.integers(1 + num_proposed, 16))
            items.append(StepItem(None, 0, prompt, max_rows, request, rank))
        elif kind == "round":
            items.append(round_of(engine, sequence_id, rank, num_proposed))
        else:
            idle.append(IdleSequence(sequence_id, rank))
    granted, preempted = grants(engine, items, idle)
    ranks = {entry.sequence_id: entry.rank for entry in (*items, *idle)}
    served = [item.rank for item, grant in zip(items, granted, strict=True) if grant.token_ids]
    assert all(ranks[sequence_id] > min(served) for sequence_id in preempted)
    if items and items[0].rank == 0 and items[0].num_rows + len(items[0].token_ids) <= num_blocks * block_size:
        assert granted[0].token_ids
    inputs = [SequenceInput(g.sequence_id, g.appended) for g in granted if g.sequence_id and g.appended]
    engine.forward_per_position_logits(inputs)
