"""Proposer `ngram`: drafts are copied from where the sequence's last tokens stood before. No model, no state."""

from collections.abc import Sequence

from draft_service.proposers.base import DraftKvUsage, ProposeInput, ProposerCapabilities, SessionKey
from draft_service.proposers.kind import OptionGroup, ProposerKind, ProposerSettings, refuse_model
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
            transports=frozenset({DraftProbsTransport.ONE_HOT, DraftProbsTransport.COUPLED}),
        )

    def propose(self, batch: Sequence[ProposeInput]) -> list[Proposal]:
        """Up to K tokens that followed the last match; none where nothing repeats."""
        return [
            Proposal(tuple(self._lookup.find(item.committed_token_ids, item.num_draft_tokens))) for item in batch
        ]

    def forget(self, session_key: SessionKey) -> None:
        """Nothing is kept."""

    def kv_usage(self) -> DraftKvUsage | None:
        """No model, no memory."""
        return None


def add_options(group: OptionGroup) -> None:
    """Add --max-ngram-size and --min-ngram-size."""
    group.add_argument("--max-ngram-size", type=int, default=5, metavar="N", help="most tokens to match")
    group.add_argument("--min-ngram-size", type=int, default=1, metavar="N", help="fewest tokens to match")


def load_ngram(settings: ProposerSettings) -> NgramProposer:
    """Needs no model, and refuses one."""
    refuse_model(settings)
    return NgramProposer(PromptLookup(settings.options.max_ngram_size, settings.options.min_ngram_size))


KIND = ProposerKind(load_ngram, add_options)
