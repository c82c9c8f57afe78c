"""Proposer `mtp`: a recurrent head drafts several tokens from the target's last hidden state.

It reads one state a round, that of the row before the last committed token. Its rows are the round's own steps, and a
row's position is the number of its step.
"""

from collections.abc import Sequence

from draft_service.proposers.base import ProposeInput
from draft_service.proposers.draft_round import DraftRound
from draft_service.proposers.head_base import HeadProposer, load_head
from draft_service.proposers.kind import ProposerSettings
from draft_service.proposers.over_target import OverTarget
from engine.heads.mtp import KIND, MtpHead, build_mtp


class MtpProposer(HeadProposer):
    """Drafts with an `MtpHead`."""

    def _tokens_of(self, item: ProposeInput) -> Sequence[int]:
        return item.committed_token_ids[-1:]

    def _first_row(self, draft: DraftRound) -> int:
        return len(draft.item.committed_token_ids) - 2

    def _finish(self, draft: DraftRound) -> None:
        self.kv.truncate(draft.key, 0)


def load_mtp(settings: ProposerSettings) -> MtpProposer:
    """See `load_head`."""
    return MtpProposer(*load_head(settings, KIND, _build))


def _build(parts: OverTarget) -> MtpHead:
    return build_mtp(parts.artefact, parts.target, parts.dtype, parts.linear, parts.max_context)
