"""One step as values: what the compute thread is given and what it gives back; the receiver changes neither."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.backends.base import KvUsage, SequenceId
from engine.sampling.policies import VerifyRows
from tandem.types import ItemError, Verdict


@dataclass(frozen=True, slots=True)
class StepItem:
    """One session's part: keep `num_rows` rows, append `token_ids`, decide `verify` from the last K + 1 rows.

    Without `verify` the item only prefills. The committed tokens inside `verify` are the session's own list:
    no item can change it while its round is in flight.
    """

    sequence_id: SequenceId | None  # None: the step creates it
    num_rows: int
    token_ids: Sequence[int]
    verify: VerifyRows | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One compute call: sequences to forget first, then one forward for all items."""

    released: tuple[SequenceId, ...]
    items: tuple[StepItem, ...]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One item's result: where its sequence stands, and the verdict or error when it decided a round."""

    sequence_id: SequenceId
    num_rows: int
    decided: Verdict | ItemError | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcomes in the order of the plan's items, and the pool after the step."""

    outcomes: tuple[StepOutcome, ...]
    kv_usage: KvUsage
    compute_us: int = 0
