"""Proposer `eagle`: a head of one layer drafts from the target's hidden states, then from its own.

Its row j reads token j + 1 of the sequence and what the target's row j has become, and gives the draft for token j + 2:
inputs are shifted by one.
"""

from collections.abc import Sequence

from draft_service.proposers.base import ProposeInput
from draft_service.proposers.draft_round import DraftRound
from draft_service.proposers.head_base import HeadProposer, load_head
from draft_service.proposers.kind import ProposerSettings
from draft_service.proposers.over_target import OverTarget
from engine.heads.eagle import KIND, EagleHead, build_eagle


class EagleProposer(HeadProposer):
    """Drafts with an `EagleHead`: a row a token, as in the target."""

    def _tokens_of(self, item: ProposeInput) -> Sequence[int]:
        return item.committed_token_ids[1:]

    def _first_row(self, draft: DraftRound) -> int:
        return len(draft.tokens) - len(draft.pending)


def load_eagle(settings: ProposerSettings) -> EagleProposer:
    """See `load_head`."""
    return EagleProposer(*load_head(settings, KIND, _build))


def _build(parts: OverTarget) -> EagleHead:
    return build_eagle(parts.artefact, parts.target, parts.dtype, parts.linear, parts.max_context)
