"""What one row of logits is for: the request it belongs to and the tokens before it."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.types import SessionSpec


@dataclass(frozen=True, slots=True)
class Row:
    """One row of logits; it decides the token at `position`, after the committed prefix and these drafts."""

    spec: SessionSpec
    committed_token_ids: Sequence[int]  # prompt and every committed token
    draft_token_ids: tuple[int, ...] = ()  # this round's drafts before the row

    @property
    def committed_len(self) -> int:
        """The round's base."""
        return len(self.committed_token_ids)

    @property
    def position(self) -> int:
        """Index, prompt included, of the token that the row decides."""
        return len(self.committed_token_ids) + len(self.draft_token_ids)

    @property
    def output_len(self) -> int:
        """Output tokens before the row, this round's drafts included."""
        return self.position - self.spec.prompt_len
