"""Hidden states of the rows that a step has computed: which of them are sent, and as what bytes.

Only rows of committed tokens are: what a draft's row holds is nobody's once the draft is rejected.
Letters: T new rows of the step, L layers asked for, E hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from engine.backends.base import EngineCapabilities, HiddenCapture
from tandem.types import ErrorCode, HiddenStates, ItemError
from tandem.validation import MAX_HIDDEN_LAYERS, are_hidden_layers
from target_service.reservation import Grant
from target_service.step import StepItem, StepOutcome

MAX_CHUNK_BYTES = 960 * 1024  # of one result, so that it fits a message of 1 MiB


def check_hidden_layers(layers: Sequence[int], capabilities: EngineCapabilities) -> None:
    """ItemError UNIMPLEMENTED, naming the backend, where there are none; INVALID_ARGUMENT for layers that cannot be."""
    if not layers:
        return
    if capabilities.hidden_size == 0:
        raise ItemError(
            ErrorCode.UNIMPLEMENTED, f"hidden_layers: backend {capabilities.backend!r} gives no hidden states"
        )
    if not are_hidden_layers(layers, capabilities.num_layers):
        raise ItemError(
            ErrorCode.INVALID_ARGUMENT,
            f"hidden_layers: {list(layers)} must be at most {MAX_HIDDEN_LAYERS}, "
            f"ascending in 1..{capabilities.num_layers}",
        )


def capture_for(items: Sequence[StepItem]) -> HiddenCapture | None:
    """What the step's forward has to keep for all of its items; None for nothing."""
    layers = sorted({layer for item in items for layer in item.hidden_layers})
    return HiddenCapture(tuple(layers)) if layers else None


def with_hidden_states(
    items: Sequence[StepItem], grants: Sequence[Grant], outcomes: Sequence[StepOutcome], capture: HiddenCapture
) -> Iterator[StepOutcome]:
    """The outcomes, each with the hidden states of its new committed rows that are wanted."""
    start = 0  # of the item's rows among the step's
    for item, grant, outcome in zip(items, grants, outcomes, strict=True):
        first_row = max(grant.num_rows, item.first_hidden_row)
        if item.hidden_layers and capture.states is not None and not isinstance(outcome.decided, ItemError):
            skipped = start + first_row - grant.num_rows
            columns = [capture.layers.index(layer) for layer in item.hidden_layers]
            # [rows, L, E]
            states = capture.states[skipped : start + outcome.num_rows - grant.num_rows, columns]
            yield replace(outcome, hidden_states=tuple(_chunks(states, first_row)))
        else:
            yield outcome
        start += grant.num_appended


def _chunks(states: torch.Tensor, first_row: int) -> Iterator[HiddenStates]:
    """float32 [rows, L, E] as it travels; nothing for no rows."""
    rows = states.to(torch.bfloat16).view(torch.int16).numpy().astype("<i2", copy=False)
    if not len(rows):
        return
    num_rows = max(1, MAX_CHUNK_BYTES // rows[0].nbytes)
    for at in range(0, len(rows), num_rows):
        chunk = rows[at : at + num_rows]
        yield HiddenStates(first_row + at, len(chunk), chunk.tobytes())
