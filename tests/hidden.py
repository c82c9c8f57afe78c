"""The toy engine's hidden states as they travel, for tests that look whether the right ones arrive."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from draft_service.proposers.base import (
    DraftKvUsage,
    HiddenStatesNeed,
    MissingHiddenStates,
    ProposeInput,
    Proposer,
    ProposerCapabilities,
    SessionKey,
)
from engine.backends.toy_backend import HIDDEN_SIZE, hidden_states
from tandem.types import HiddenStates, Proposal

LAYERS = (1, 3)
NEED = HiddenStatesNeed(LAYERS, HIDDEN_SIZE)


class Reader:
    """Another proposer's drafts for who has all of its hidden states; AssertionError for a row that is not right.

    It keeps only how many rows each session has brought; told so, it loses them.
    """

    def __init__(self, drafts: Proposer, need: HiddenStatesNeed = NEED) -> None:
        self.batches: list[list[ProposeInput]] = []
        self._has_lost = False
        self._drafts = drafts
        self._need = need
        self._num_rows: dict[SessionKey, int] = {}

    @property
    def capabilities(self) -> ProposerCapabilities:
        return replace(self._drafts.capabilities, name="reader", hidden_states=self._need)

    def propose(self, batch: Sequence[ProposeInput]) -> list[Proposal | MissingHiddenStates | None]:
        self.batches.append(list(batch))
        if self._has_lost:
            self._has_lost = False
            self._num_rows.clear()
        proposals = self._drafts.propose(batch)
        return [
            proposal if self._read(item) else MissingHiddenStates()
            for item, proposal in zip(batch, proposals, strict=True)
        ]

    def lose(self) -> None:
        """What every session has brought, as of the next batch; from whatever thread."""
        self._has_lost = True

    def forget(self, session_key: SessionKey) -> None:
        self._num_rows.pop(session_key, None)
        self._drafts.forget(session_key)

    def kv_usage(self) -> DraftKvUsage | None:
        return self._drafts.kv_usage()

    def _read(self, item: ProposeInput) -> bool:
        """Whether nothing is missing."""
        num_rows = len(item.committed_token_ids) - 1
        first = item.hidden_states[0].first_row if item.hidden_states else num_rows
        if first > self._num_rows.get(item.session_key, 0):
            return False
        right = rows_of(item.committed_token_ids, self._need.layers)
        assert rows_in(item.hidden_states) == {row: right[row] for row in range(first, num_rows)}
        self._num_rows[item.session_key] = num_rows
        return True


def rows_of(token_ids: Sequence[int], layers: Sequence[int] = LAYERS) -> dict[int, bytes]:
    """Those of every token, by row."""
    states = hidden_states(token_ids, 0, layers).to(torch.bfloat16)
    assert torch.equal(states.float(), hidden_states(token_ids, 0, layers))  # nothing is lost by travelling
    return {row: states[row].view(torch.int16).numpy().tobytes() for row in range(len(token_ids))}


def states_before(token_ids: Sequence[int], need: HiddenStatesNeed | None) -> tuple[HiddenStates, ...]:
    """What a proposer with this need is given with a round of these committed tokens."""
    if need is None or len(token_ids) < 2:
        return ()
    rows = rows_of(token_ids[:-1], need.layers)
    return (HiddenStates(0, len(rows), b"".join(rows.values())),)


def rows_in(chunks: Iterable[HiddenStates]) -> dict[int, bytes]:
    """What has come, by row; AssertionError when a row came twice with other states."""
    rows: dict[int, bytes] = {}
    for chunk in chunks:
        size = len(chunk.data) // chunk.num_rows
        for at in range(chunk.num_rows):
            data = chunk.data[at * size : (at + 1) * size]
            assert rows.setdefault(chunk.first_row + at, data) == data
    return rows
