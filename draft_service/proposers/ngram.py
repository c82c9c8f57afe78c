"""Proposer `ngram`: drafts are copied from where the sequence's last tokens stood before. No model, no state."""

from collections.abc import Sequence

from draft_service.proposers.base import ProposeInput, ProposerCapabilities, SessionKey
from engine.backends.base import KvUsage
from tandem.prompt_lookup import PromptLookup
from tandem.types import DraftProbsTransport, Proposal


class NgramProposer:
    """Deterministic, so q is one-hot under `rejection` and does not matter under `greedy` and `coupled`."""

    def __init__(self, lookup: PromptLookup) -> None:
        self._lookup = lookup

    @property
    def capabilities(self) -> ProposerCapabilities:
        return ProposerCapabilities(
            name="ngram",
            graph_safe=False,
            needs_hidden_states=False,
            transports=frozenset({DraftProbsTransport.ONE_HOT, DraftProbsTransport.COUPLED}),
        )

    def propose(self, batch: Sequence[ProposeInput]) -> list[Proposal]:
        """Up to K tokens that followed the last match; none where nothing repeats."""
        return [
            Proposal(tuple(self._lookup.find(item.committed_token_ids, item.num_draft_tokens))) for item in batch
        ]

    def forget(self, session_key: SessionKey) -> None:
        """Nothing is kept."""

    def kv_usage(self) -> KvUsage | None:
        """No model, no memory."""
        return None
