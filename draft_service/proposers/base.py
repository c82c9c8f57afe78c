"""The Proposer protocol: the role that returns draft tokens for a batch of sessions.

Letters: K draft tokens wanted for one session in this round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol

from engine.backends.base import KvUsage
from tandem.types import DraftProbsTransport, HiddenStates, ModelInfo, Proposal, SessionSpec, VerificationPolicy

INTERFACE_VERSION = 2  # of what is declared here; docs/proposers/writing.md says what it has

SessionKey = NewType("SessionKey", int)  # one opening of one session; never used again, later ones are larger


@dataclass(frozen=True, slots=True)
class HiddenStatesNeed:
    """Which of the target's hidden states a proposer drafts from."""

    layers: tuple[int, ...]  # after so many of the target's layers; ascending, at least one
    size: int  # numbers after one layer: the target's hidden size

    @property
    def row_bytes(self) -> int:
        """Of one row as it travels, in bfloat16."""
        return 2 * self.size * len(self.layers)


@dataclass(frozen=True, slots=True)
class ProposerCapabilities:
    """What a proposer is, can do and needs; the handshake and the refusals are made from it."""

    name: str  # the one it is registered by
    graph_safe: bool  # its steps can be captured: no per-step state is assembled on the host
    transports: frozenset[DraftProbsTransport]  # how it can send q
    policies: frozenset[VerificationPolicy] = frozenset(VerificationPolicy)  # sessions it drafts for
    proposes_trees: bool = False  # with `parents`; refused until the target verifies them
    model: ModelInfo = field(default_factory=ModelInfo)  # of no model: any vocabulary and context will do
    hidden_states: HiddenStatesNeed | None = None  # of the target; None: it needs none

    @property
    def needs_hidden_states(self) -> bool:
        """Of the target."""
        return self.hidden_states is not None


@dataclass(frozen=True, slots=True)
class ProposeInput:
    """One session's part of a propose batch; the tokens are a copy that nobody changes."""

    session_key: SessionKey
    spec: SessionSpec
    committed_token_ids: Sequence[int]  # prompt and every committed token, at least 1
    num_draft_tokens: int  # K >= 1
    # Consecutive rows of the target, up to that of the last committed token but one: those that came since the last
    # proposal of the session. Empty for a proposer that needs none.
    hidden_states: tuple[HiddenStates, ...] = ()


@dataclass(frozen=True, slots=True)
class MissingHiddenStates:
    """An answer: it has lost what it made of rows that the input no longer has. All of them are sent again then."""


@dataclass(frozen=True, slots=True)
class DraftKvUsage:
    """A draft model's key-value memory."""

    blocks: KvUsage
    shrunk_draft_tokens: int  # drafts not made for want of it, since start


class Proposer(Protocol):
    """Returns drafts; one caller at a time, on the compute thread.

    A proposer may keep state per session key, but each input says the whole truth: whatever it kept for other
    tokens is rolled back to what both have in common.
    """

    @property
    def capabilities(self) -> ProposerCapabilities: ...

    def propose(self, batch: Sequence[ProposeInput]) -> Sequence[Proposal | MissingHiddenStates | None]:
        """One answer per input, in order, each of 0..K drafts; no session key twice in a batch.

        None for "not yet": whoever has much to catch up does a part of it, and is given the same input again with
        the next batch, so that the others' drafts need not wait. Nobody has to make use of it.
        Raises only for bugs: what it cannot draft (no memory, context too short) is an empty proposal.
        """
        ...

    def forget(self, session_key: SessionKey) -> None:
        """Free what is kept for the session; a no-op when that is nothing."""
        ...

    def kv_usage(self) -> DraftKvUsage | None:
        """The memory's figures now; None without a model."""
        ...
