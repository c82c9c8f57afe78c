"""What one target replica lets in: every limit of the scheduler, and how they must fit each other."""

from dataclasses import dataclass

from engine.backends.base import EngineCapabilities, KvUsage
from tandem.defaults import MAX_DRAFT_TOKENS, MAX_SESSIONS, MAX_STEP_TOKENS

MAX_PREFILL_TOKENS = 128  # by default
# Who has asked nothing for so long may lose its memory and its place to anybody. Between its rounds an active session
# is silent while its orchestrator waits for drafts, up to 5 s by default; this is twice that, so that one whose draft
# service is slow is not taken for one that has been left.
IDLE_S = 10.0
_LEAST = {
    "max_sessions": 1,
    "max_waiting_sessions": 0,
    "max_draft_tokens": 0,
    "max_step_tokens": 2,  # a round and a prompt, so that neither can keep the other out
    "max_batch": 2,  # as above
    "max_prefill_tokens": 1,
    "session_lease_s": 0,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scheduler; ValueError, naming both knobs, where two of them cannot hold together."""

    max_sessions: int = MAX_SESSIONS  # running at once
    max_waiting_sessions: int = 1024  # opened and waiting for room
    max_draft_tokens: int = MAX_DRAFT_TOKENS  # verified in one round; more are ignored
    max_step_tokens: int = MAX_STEP_TOKENS  # rows of one forward
    max_prefill_tokens: int | None = None  # rows of prompts in a step while others decode; None: 128 or what fits
    max_batch: int | None = None  # sessions of one step; None: as many as it has rows for
    session_lease_s: float = 600.0  # a session without an item for longer is freed

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{_option(name)} {value} is less than {least}")
        if self.max_step_tokens < self.max_draft_tokens + 1:
            raise ValueError(
                f"--max-step-tokens {self.max_step_tokens} cannot hold a round of --max-draft-tokens "
                f"{self.max_draft_tokens} drafts, which needs {self.max_draft_tokens + 1} rows"
            )
        self._check_at_most("max_prefill_tokens", "max_step_tokens", "no step has so many rows")
        self._check_at_most("max_batch", "max_step_tokens", "every session of a step needs a row")
        self._check_at_most("max_batch", "max_sessions", "no more than those are ever running")

    @property
    def prefill_tokens(self) -> int:
        """Most rows of prompts in a step while others decode."""
        default = min(MAX_PREFILL_TOKENS, self.max_step_tokens)
        return default if self.max_prefill_tokens is None else self.max_prefill_tokens

    @property
    def batch_size(self) -> int:
        """Most sessions of a step."""
        return self.max_step_tokens if self.max_batch is None else self.max_batch

    def check_pool(self, capabilities: EngineCapabilities, kv_usage: KvUsage) -> str | None:
        """What is worth a warning about the pool's size, if anything.

        Raises ValueError, naming both knobs, when not even one round of the most drafts fits into it.
        """
        num_rows = kv_usage.total_blocks * kv_usage.block_size
        if num_rows < self.max_draft_tokens + 1:
            raise ValueError(
                f"--kv-memory holds {num_rows} tokens ({kv_usage.total_blocks} blocks of --block-size "
                f"{kv_usage.block_size}), a round of --max-draft-tokens {self.max_draft_tokens} drafts needs "
                f"{self.max_draft_tokens + 1}"
            )
        if num_rows < capabilities.max_context:
            return (
                f"--kv-memory holds {num_rows} tokens, fewer than the --max-context of {capabilities.max_context}: "
                f"a request whose prompt and max_tokens are more than {num_rows} together is always refused"
            )
        return None

    def _check_at_most(self, name: str, other: str, why: str) -> None:
        value, most = getattr(self, name), getattr(self, other)
        if value is not None and value > most:
            raise ValueError(f"{_option(name)} {value} is more than {_option(other)} {most}: {why}")


def _option(name: str) -> str:
    """How the command line calls a limit."""
    return "--" + name.removesuffix("_s").replace("_", "-")
