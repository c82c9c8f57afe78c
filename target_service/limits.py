"""What one target replica lets in."""

from dataclasses import dataclass

from tandem.defaults import MAX_DRAFT_TOKENS, MAX_SESSIONS, MAX_STEP_TOKENS


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scheduler; ValueError, naming both knobs, when a full round could not fit in a step."""

    max_sessions: int = MAX_SESSIONS  # admitted at once
    max_waiting_sessions: int = 1024  # opened and waiting for room
    max_draft_tokens: int = MAX_DRAFT_TOKENS  # verified in one round; more are ignored
    max_step_tokens: int = MAX_STEP_TOKENS  # rows of one forward

    def __post_init__(self) -> None:
        for name, least in (("max_sessions", 1), ("max_waiting_sessions", 0), ("max_draft_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} is less than {least}")
        if self.max_step_tokens < self.max_draft_tokens + 1:
            raise ValueError(
                f"--max-step-tokens {self.max_step_tokens} cannot hold a round of --max-draft-tokens "
                f"{self.max_draft_tokens} drafts, which needs {self.max_draft_tokens + 1} rows"
            )
