"""One step as values: what the compute thread is given and what it gives back; the receiver changes neither."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.backends.base import KvUsage, SequenceId
from engine.sampling.policies import VerifyRows
from tandem.types import HiddenStates, ItemError, Verdict


class StepFailedError(Exception):
    """The step raised; its cause says what. The sequences in `preempted` were given up before it did."""

    def __init__(self, preempted: tuple[SequenceId, ...]) -> None:
        super().__init__("the step failed")
        self.preempted = preempted


@dataclass(frozen=True, slots=True)
class StepItem:
    """One session's part: keep `num_rows` rows, append rows of `token_ids`, decide `verify` from the last K + 1 rows.

    Where `verify` does not fit into `max_rows` behind the missing rows, or is None, the item only prefills. The
    committed tokens inside `verify` are the session's own list: no item can change it while its round is in flight.
    """

    sequence_id: SequenceId | None  # None: the step creates it, and finds what rows the prefix cache has
    num_rows: int
    token_ids: Sequence[int]  # the committed tokens without a row, the last of all included
    max_rows: int  # most rows to append, drafts included: of those there are fewer
    verify: VerifyRows | None = None
    rank: int = 0  # among all sequences of the step; a lower one keeps its memory longer
    num_findable: int | None = (
        None  # first tokens whose rows may come from the prefix cache; None: all but the last
    )
    hidden_layers: tuple[int, ...] = ()  # after which the hidden states of its new rows are wanted, ascending
    first_hidden_row: int = 0  # earlier ones are not wanted


@dataclass(frozen=True, slots=True)
class IdleSequence:
    """A sequence that has rows and no part in the step, and may lose them to sequences of a lower rank."""

    sequence_id: SequenceId
    rank: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One compute call: sequences to forget first, then one forward for all items, which come in order of rank."""

    released: tuple[SequenceId, ...]
    items: tuple[StepItem, ...]
    idle: tuple[IdleSequence, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One item's result: where its sequence stands, and the verdict or error when it decided a round.

    An item for which there was no memory is as it was; one whose sequence was preempted, or could not be begun, has
    none.
    """

    sequence_id: SequenceId | None
    num_rows: int
    decided: Verdict | ItemError | None = None
    num_found: int | None = None  # rows that a sequence created by this step found in the prefix cache
    hidden_states: tuple[HiddenStates, ...] = ()  # of its new committed rows, when they are wanted


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcomes in the order of the plan's items, and the pool after the step."""

    outcomes: tuple[StepOutcome, ...]
    preempted: tuple[SequenceId, ...]  # given up for items of a lower rank, items of the step among them
    kv_usage: KvUsage
    batch_rows: int = 0  # of the forward
    compute_us: int = 0
