"""Proposers that no honest service would run: a target under `greedy` or `coupled` must not care."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from draft_service.proposers.base import DraftKvUsage, ProposeInput, Proposer, ProposerCapabilities, SessionKey
from tandem.prefix_hash import EMPTY_PREFIX_HASH, extend_prefix_hash
from tandem.types import DraftProbsTransport, Proposal

MAX_VARYING = 8


class MadeUp:
    """Drafts from a function of the committed tokens and K; no model, no state."""

    def __init__(self, drafts_of: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        self._drafts_of = drafts_of

    @property
    def capabilities(self) -> ProposerCapabilities:
        transports = frozenset({DraftProbsTransport.ONE_HOT, DraftProbsTransport.COUPLED})
        return ProposerCapabilities("made_up", graph_safe=False, transports=transports)

    def propose(self, batch: Sequence[ProposeInput]) -> list[Proposal]:
        return [Proposal(tuple(self._drafts_of(item.committed_token_ids, item.num_draft_tokens))) for item in batch]

    def forget(self, session_key: SessionKey) -> None:
        """Nothing is kept."""

    def kv_usage(self) -> DraftKvUsage | None:
        return None


def random_drafts(vocab_size: int) -> MadeUp:
    """Any tokens at all, other ones for every prefix."""

    def drafts_of(committed_token_ids: Sequence[int], num_wanted: int) -> list[int]:
        prefix_hash = extend_prefix_hash(EMPTY_PREFIX_HASH, committed_token_ids)
        return [extend_prefix_hash(prefix_hash, (index,)) % vocab_size for index in range(num_wanted)]

    return MadeUp(drafts_of)


class Varying:
    """Another proposer's drafts, but 0 .. 8 of them as a hash of the round's position says."""

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner
        self.widths: set[int] = set()  # that were asked of the inner one

    @property
    def capabilities(self) -> ProposerCapabilities:
        return self._inner.capabilities

    def propose(self, batch: Sequence[ProposeInput]) -> list[Proposal]:
        widths = [min(item.num_draft_tokens, _width(len(item.committed_token_ids))) for item in batch]
        self.widths |= set(widths)
        asked = [replace(item, num_draft_tokens=width) for item, width in zip(batch, widths, strict=True) if width]
        proposals = iter(self._inner.propose(asked) if asked else [])
        return [next(proposals) if width else Proposal() for width in widths]

    def forget(self, session_key: SessionKey) -> None:
        self._inner.forget(session_key)

    def kv_usage(self) -> DraftKvUsage | None:
        return self._inner.kv_usage()


def _width(position: int) -> int:
    return extend_prefix_hash(EMPTY_PREFIX_HASH, (position,)) % (MAX_VARYING + 1)
