"""Drafts that are all, some or not accepted, at every offset in a block: rows are those of a fresh prefill."""

import pytest

from target_service.limits import Limits
from tests.target.harness import VOCAB, Bench, plain_decode, spec, toy

NUM_ROUNDS = 4


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_after_every_round_the_rows_are_the_committed_tokens_but_the_last_in_as_few_blocks_as_hold_them(
    block_size: int, prefix_cache: bool
) -> None:
    bench = Bench(toy(num_blocks=256, block_size=block_size, prefix_cache=prefix_cache), Limits(max_draft_tokens=4))
    number = 0
    for prompt_len in range(1, 41):
        session = spec(tuple(range(7, 7 + prompt_len))[:25] + (3,) * (prompt_len - 25), max_tokens=24)
        plain = plain_decode(session)
        for num_right in (0, 2, 4):
            number += 1
            bench.open(session, number)
            tokens = list(session.token_ids)
            for round_number in range(1, NUM_ROUNDS + 1):
                done = len(tokens) - prompt_len
                right = plain[done : done + 4]
                drafts = [*right[:num_right], *((token + 1) % VOCAB for token in right[num_right:])]
                verdict = bench.round(tokens, round_number, drafts, session=number)
                assert verdict.num_accepted == num_right
                (held,) = map(bench.engine.token_ids, bench.engine.sequence_ids)
                assert held == tokens[:-1]
                assert bench.used_blocks() == -(-(len(tokens) - 1) // block_size)
            assert tokens[prompt_len:] == plain[: len(tokens) - prompt_len]
            bench.table.end_stream(bench.answers[-1][0])
            bench.settle()
            assert bench.used_blocks() == 0
