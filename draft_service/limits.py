"""What one draft replica serves and grants: every limit, and what contradicts what."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from draft_service.proposers.base import ProposerCapabilities
from engine.backends.base import KvUsage
from tandem.defaults import MAX_DRAFT_TOKENS, MAX_SESSIONS
from tandem.types import MAX_DRAFT_PROBS_BYTES, DraftProbsTransport, ErrorCode, ItemError, SessionSpec
from tandem.validation import check_session, check_token_ids

# Who has had no item for so long may lose its place and its memory to others. Between its rounds an active session has
# none for as long as the target takes; if it could lose them then, one session more than there is room for would make
# all of them take each other's, round by round, and none would ever have drafts.
IDLE_S = 5.0
_ANY_VOCABULARY = 2**32  # a token id is 32 bits on the wire
_ANY_CONTEXT = 2**33  # the draft's own context refuses nobody: past its end it stops drafting
_PROB_BYTES = 4


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What the operator grants; ValueError, naming the option, for what cannot be."""

    max_draft_tokens: int = MAX_DRAFT_TOKENS  # a round
    max_sessions: int = MAX_SESSIONS  # of all streams together
    max_batch: int = MAX_SESSIONS  # sessions drafted for at a time
    session_lease_s: float = 600.0  # an open session without an item for longer is forgotten
    max_draft_probs_bytes: int = MAX_DRAFT_PROBS_BYTES  # a proposal; more would be refused by whoever receives it

    def __post_init__(self) -> None:
        for name in ("max_draft_tokens", "max_sessions", "max_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} is less than 1")
        if not self.session_lease_s > 0:
            raise ValueError(f"--session-lease {self.session_lease_s:g} is not above 0")

    def check_step(self, max_step_tokens: int) -> None:
        """ValueError, naming both options, when one step has no room for a batch."""
        if self.max_batch > max_step_tokens:
            raise ValueError(
                f"--max-batch {self.max_batch} is more than --max-step-tokens {max_step_tokens}, "
                "and a step drafts a token for every session of a batch"
            )

    def check_memory(self, usage: KvUsage) -> None:
        """ValueError, naming both options, when all of the memory has no room for a round of one session."""
        num_rows = usage.total_blocks * usage.block_size
        if num_rows < self.max_draft_tokens:
            raise ValueError(
                f"--kv-memory has room for {num_rows} tokens ({usage.total_blocks} blocks of {usage.block_size}), "
                f"and one round of --max-draft-tokens {self.max_draft_tokens} needs {self.max_draft_tokens}"
            )


@dataclass(frozen=True, slots=True)
class Offer:
    """What the limits and the proposer together can do for a session."""

    limits: DraftLimits
    capabilities: ProposerCapabilities

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.capabilities.model.vocab_size or _ANY_VOCABULARY

    def check(self, spec: SessionSpec) -> None:
        """Raise ItemError or InvalidArgumentError, naming the limit, for a session that can never be served."""
        check_session(spec, _ANY_VOCABULARY, _ANY_CONTEXT)
        check_token_ids("prompt", spec.token_ids, self.vocab_size)
        self._check_served("verification_policy", spec.effective_policy, self.capabilities.policies)
        self._check_served("draft_probs_transport", spec.draft_probs_transport, self.capabilities.transports)
        if self.max_draft_tokens(spec) < 1:
            raise ItemError(
                ErrorCode.INVALID_ARGUMENT,
                f"draft_probs_transport {spec.draft_probs_transport.value!r}: one draft of {self.vocab_size} ids takes "
                f"{_PROB_BYTES * self.vocab_size} bytes, more than the limit of {self.limits.max_draft_probs_bytes} "
                "of a proposal",
            )

    def max_draft_tokens(self, spec: SessionSpec) -> int:
        """Most drafts of one of the session's rounds: under `full` no more than whose q one proposal may hold."""
        most = self.limits.max_draft_tokens
        if spec.uses_draft_probs and spec.draft_probs_transport is DraftProbsTransport.FULL:
            return min(most, self.limits.max_draft_probs_bytes // (_PROB_BYTES * self.vocab_size))
        return most

    def _check_served(self, field: str, wanted: StrEnum, served: Collection[StrEnum]) -> None:
        """ItemError UNIMPLEMENTED naming both for what the proposer does not do."""
        if wanted not in served:
            raise ItemError(
                ErrorCode.UNIMPLEMENTED,
                f"{field} {wanted.value!r} is not served by proposer {self.capabilities.name!r}; "
                f"it serves: {', '.join(sorted(served))}",
            )
