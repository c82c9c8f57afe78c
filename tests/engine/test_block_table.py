"""Block accounting: tables append, fork, truncate and release over one pool, and nothing is ever lost."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.backends.base import OutOfBlocksError
from engine.kv.block_pool import BlockPool
from engine.kv.block_table import BlockCopy, BlockTable, num_blocks_for_step


def filled(pool: BlockPool, num_tokens: int) -> BlockTable:
    table = BlockTable(pool)
    table.append([0] * num_tokens)
    return table


def test_a_fresh_pool_hands_out_consecutive_blocks() -> None:
    assert BlockPool(4, 2).allocate(3) == [0, 1, 2]


def test_allocating_more_than_is_free_raises_and_changes_nothing() -> None:
    pool = BlockPool(3, 2)
    pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match="2 key-value blocks are needed, 1 of 3 can be had"):
        pool.allocate(2)
    assert pool.num_available == 1


@pytest.mark.parametrize("action", ["free", "share"])
def test_a_free_block_can_be_neither_freed_nor_shared(action: str) -> None:
    pool = BlockPool(2, 2)
    with pytest.raises(ValueError, match="block 1 is"):
        getattr(pool, action)([1])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_a_pool_needs_blocks_and_a_block_tokens(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="num_blocks >= 1 and block_size >= 1"):
        BlockPool(num_blocks, block_size)


def test_a_shared_block_is_free_only_after_its_last_reference() -> None:
    pool = BlockPool(2, 2)
    block_ids = pool.allocate(1)
    pool.share(block_ids)
    pool.free(block_ids)
    assert pool.usage().used_blocks == 1
    pool.free(block_ids)
    assert pool.usage().used_blocks == 0


def test_a_fork_takes_no_block_until_one_side_writes_into_the_shared_last_block() -> None:
    pool = BlockPool(8, 4)
    table = filled(pool, 6)
    twin = table.fork()
    assert pool.usage().used_blocks == 2
    original = table.block_ids[1]
    assert twin.append([1]) == [BlockCopy(original, twin.block_ids[1])]
    assert table.block_ids[1] == original != twin.block_ids[1]
    assert table.append([1]) == [], "the other side now owns the original alone"


def test_appending_behind_a_full_shared_block_copies_nothing() -> None:
    pool = BlockPool(8, 4)
    table = filled(pool, 8)
    assert table.fork().append([1]) == []


def test_truncating_into_a_shared_block_makes_the_next_append_copy_it() -> None:
    pool = BlockPool(8, 4)
    table = filled(pool, 8)
    twin = table.fork()
    twin.truncate(3)
    assert twin.append([1]) == [BlockCopy(table.block_ids[0], twin.block_ids[0])]


def test_truncate_is_absolute_and_repeating_it_changes_nothing() -> None:
    pool = BlockPool(8, 4)
    table = filled(pool, 11)
    for _ in range(2):
        table.truncate(5)
        assert (table.num_tokens, len(table.block_ids)) == (5, 2)
    table.truncate(9)
    assert table.num_tokens == 5


def test_truncating_to_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        filled(BlockPool(8, 4), 3).truncate(-1)


def test_the_last_of_all_writers_of_a_shared_block_keeps_the_original() -> None:
    pool = BlockPool(3, 4)
    table = filled(pool, 2)
    twins = [table.fork(), table.fork()]
    appends = [(each, 1) for each in (table, *twins)]
    assert num_blocks_for_step(pool, appends) == 2 == pool.num_available
    for each, num_tokens in appends:
        each.append([0] * num_tokens)
    assert pool.num_available == 0


def test_with_a_holder_outside_the_step_every_writer_takes_a_copy() -> None:
    pool = BlockPool(8, 4)
    table = filled(pool, 2)
    twin, _bystander = table.fork(), table.fork()
    assert num_blocks_for_step(pool, [(table, 1), (twin, 1)]) == 2


class TableMachine(RuleBasedStateMachine):
    """Random life of tables over a small pool with a prefix cache.

    Beside them a naive model: each table's tokens as a list, and what was written to each row of memory. A row's
    content is the whole prefix that it was computed for, as a key-value row's is.
    """

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 3, prefix_cache=True)
        self.alive: list[BlockTable] = []
        self.tokens: dict[int, list[int]] = {}  # id(table) -> its tokens
        self.memory: dict[
            tuple[int, int], tuple[int, ...]
        ] = {}  # (block, offset) -> the prefix whose last row it is

    def track(self, table: BlockTable, token_ids: list[int]) -> BlockTable:
        self.alive.append(table)
        self.tokens[id(table)] = token_ids
        return table

    @rule(target=tables, token_ids=st.lists(st.integers(0, 1), max_size=10))
    def create(self, token_ids: list[int]) -> BlockTable:
        table = BlockTable.from_cache(self.pool, token_ids)
        assert table.num_tokens % 3 == 0
        return self.track(table, token_ids[: table.num_tokens])

    @rule(target=tables, table=tables)
    def fork(self, table: BlockTable) -> BlockTable:
        return self.track(table.fork(), list(self.tokens[id(table)]))

    @rule(table=tables, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=8), has_failed=st.booleans())
    def append(self, table: BlockTable, token_ids: list[int], has_failed: bool) -> None:
        before, available = (table.num_tokens, list(table.block_ids)), self.pool.num_available
        needed = num_blocks_for_step(self.pool, [(table, len(token_ids))])
        if needed > available:
            with pytest.raises(OutOfBlocksError):
                table.append(token_ids)
            assert (table.num_tokens, list(table.block_ids), self.pool.num_available) == (*before, available)
            return
        for source, destination in table.append(token_ids):
            for offset in range(3):
                self.memory[destination, offset] = self.memory.get((source, offset), ())
        assert available - self.pool.num_available == needed
        tokens = [*self.tokens[id(table)], *token_ids]
        for row in range(before[0], table.num_tokens):
            block_row = table.block_ids[row // 3], row % 3
            self.memory[block_row] = (-1,) if has_failed else tuple(tokens[: row + 1])
        if has_failed:
            table.truncate(before[0])
        else:
            table.seal()
            self.tokens[id(table)] = tokens

    @rule(table=tables, num_tokens=st.integers(0, 12))
    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        table.truncate(num_tokens)
        del self.tokens[id(table)][num_tokens:]

    @rule(table=consumes(tables))
    def release(self, table: BlockTable) -> None:
        table.release()
        self.alive.remove(table)
        del self.tokens[id(table)]

    @invariant()
    def every_row_is_of_the_tables_own_tokens(self) -> None:
        for table in self.alive:
            tokens = self.tokens[id(table)]
            assert list(table.token_ids) == tokens
            read = [self.memory[table.block_ids[row // 3], row % 3] for row in range(table.num_tokens)]
            assert read == [tuple(tokens[: row + 1]) for row in range(len(tokens))]

    @invariant()
    def accounting_closes(self) -> None:
        usage = self.pool.usage()
        assert usage.free_blocks + usage.used_blocks + usage.cached_blocks == usage.total_blocks
        listed = [block for table in self.alive for block in table.block_ids]
        assert usage.used_blocks == len(set(listed))
        assert all(self.pool.num_references(block) == listed.count(block) for block in set(listed))
        assert len(self.pool._cache) <= usage.total_blocks


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
