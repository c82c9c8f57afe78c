"""The 64-bit rolling hash of token ids that stamps every message.

h(empty) = 0x7461_6E64_656D_0001; appending token t gives h' = mix(h xor (t + 1)), where mix is one multiply and
two xor-shifts on 64 bits. The order of tokens matters, and so does every token: equal length with other tokens
is seen. Not a cryptographic hash; it guards against faults, not against an adversary on the inner wire.
"""

from collections.abc import Iterable

EMPTY_PREFIX_HASH = 0x7461_6E64_656D_0001
_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E37_79B9_7F4A_7C15  # 2^64 / golden ratio, odd


def extend_prefix_hash(prefix_hash: int, token_ids: Iterable[int]) -> int:
    """The hash of a prefix with hash `prefix_hash` followed by `token_ids` (each in 0 .. 2^32 - 1)."""
    for token_id in token_ids:
        prefix_hash ^= token_id + 1
        prefix_hash = ((prefix_hash ^ (prefix_hash >> 32)) * _MULTIPLIER) & _MASK
        prefix_hash ^= prefix_hash >> 29
    return prefix_hash


class HashedTokens:
    """Token ids with the hash of each of their prefixes: append and absolute truncate."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._token_ids: list[int] = []
        self._hashes: list[int] = [EMPTY_PREFIX_HASH]
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The tokens; not to be changed by the caller."""
        return self._token_ids

    def prefix_hash(self, length: int | None = None) -> int:
        """The hash of the first `length` tokens, of all when None; IndexError beyond the end."""
        return self._hashes[len(self._token_ids) if length is None else length]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens."""
        for token_id in token_ids:
            self._token_ids.append(token_id)
            self._hashes.append(extend_prefix_hash(self._hashes[-1], (token_id,)))

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; a no-op when there are fewer."""
        del self._token_ids[length:]
        del self._hashes[length + 1 :]
