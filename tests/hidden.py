"""The toy engine's hidden states as they travel, for tests that look whether the right ones arrive."""

from collections.abc import Iterable, Sequence

import torch

from engine.backends.toy_backend import hidden_states
from tandem.types import HiddenStates

LAYERS = (1, 3)


def rows_of(token_ids: Sequence[int], layers: Sequence[int] = LAYERS) -> dict[int, bytes]:
    """Those of every token, by row."""
    states = hidden_states(token_ids, 0, layers).to(torch.bfloat16)
    assert torch.equal(states.float(), hidden_states(token_ids, 0, layers))  # nothing is lost by travelling
    return {row: states[row].view(torch.int16).numpy().tobytes() for row in range(len(token_ids))}


def rows_in(chunks: Iterable[HiddenStates]) -> dict[int, bytes]:
    """What has come, by row; AssertionError when a row came twice with other states."""
    rows: dict[int, bytes] = {}
    for chunk in chunks:
        size = len(chunk.data) // chunk.num_rows
        for at in range(chunk.num_rows):
            data = chunk.data[at * size : (at + 1) * size]
            assert rows.setdefault(chunk.first_row + at, data) == data
    return rows
