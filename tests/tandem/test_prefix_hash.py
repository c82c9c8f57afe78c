"""The rolling hash: test vectors, and agreement of the incremental forms."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.prefix_hash import EMPTY_PREFIX_HASH, HashedTokens, extend_prefix_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)
# Computed once from the definition in the module's docstring with arbitrary-precision integers.
VECTORS = [
    ([], 0x74616E64656D0001),
    ([0], 0xEC7DA91193883683),
    (list(range(8000)), 0x678D7586A0476938),
]


def test_vectors() -> None:
    for token_ids, expected in VECTORS:
        assert extend_prefix_hash(EMPTY_PREFIX_HASH, token_ids) == expected


@given(TOKENS, TOKENS)
def test_extending_in_two_steps_is_extending_once(first: list[int], second: list[int]) -> None:
    once = extend_prefix_hash(EMPTY_PREFIX_HASH, first + second)
    assert extend_prefix_hash(extend_prefix_hash(EMPTY_PREFIX_HASH, first), second) == once


@given(TOKENS, st.integers(0, 25))
def test_truncate_and_prefix_hash_agree_with_a_fresh_hash(token_ids: list[int], length: int) -> None:
    hashed = HashedTokens(token_ids)
    kept = token_ids[:length]
    if length <= len(token_ids):
        assert hashed.prefix_hash(length) == extend_prefix_hash(EMPTY_PREFIX_HASH, kept)
    hashed.truncate(length)
    assert hashed.token_ids == kept
    assert hashed.prefix_hash() == extend_prefix_hash(EMPTY_PREFIX_HASH, kept)


def test_equal_length_with_other_tokens_or_order_is_seen() -> None:
    hashes = {HashedTokens(ids).prefix_hash() for ids in ([1, 2, 3], [1, 3, 2], [1, 2, 4], [0, 2, 3])}
    assert len(hashes) == 4
