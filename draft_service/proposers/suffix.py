"""Proposer `suffix`: drafts go on as the longest end of the sequence that stood somewhere before went on most often.

It looks in the session's own tokens and in recent outputs of the replica. No model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from draft_service.proposers.base import DraftKvUsage, ProposeInput, ProposerCapabilities, SessionKey
from draft_service.proposers.kind import OptionGroup, ProposerKind, ProposerSettings, refuse_model
from draft_service.proposers.suffix_automaton import Match, SuffixAutomaton
from draft_service.proposers.suffix_memory import Reading, SuffixMemory
from tandem.types import DraftProbsTransport, Proposal, VerificationPolicy
from tandem.validation import check_range

_MAX_TOKENS = 1 << 18  # about 30 MB
_MAX_NEW_TOKENS = 8192  # of long prompts read in one batch, about 20 ms: the rest waits for the next one
_ALWAYS_READ = 64  # new tokens of a session that do not wait
# A ratio test needs drafts that do not know its noise. Another request with the same seed had the same noise, and its
# output tells of it: where that rejected one token and took another, this one would draft the other and reject it.
_POLICIES_WITH_OUTPUTS = frozenset({VerificationPolicy.GREEDY, VerificationPolicy.COUPLED})


class Guess(NamedTuple):
    """Drafts from one place. Measured, those of a longer match are right more often, whatever the others promise."""

    match_len: int
    num_expected: float  # drafts that are right if the text goes on as often as it did
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class DraftLength:
    """How far to go. ValueError, naming the option, for what cannot be."""

    drafts_per_match: float = 3.0  # most drafts for each token of the match
    min_draft_share: float = 0.1  # of what followed before; the shares of a proposal's drafts are multiplied

    def __post_init__(self) -> None:
        check_range("--drafts-per-match", self.drafts_per_match, 0.01, 100.0)
        check_range("--min-draft-share", self.min_draft_share, 0.0, 1.0)

    def guess(self, text: SuffixAutomaton, match: Match, num_draft_tokens: int) -> Guess:
        """At most so many tokens that followed the match."""
        num_wanted = min(num_draft_tokens, math.ceil(self.drafts_per_match * match.length))
        token_ids: list[int] = []
        share, num_expected, end = 1.0, 0.0, match
        while len(token_ids) < num_wanted:
            follower = text.follower(end)
            if follower is None or share * follower.share < self.min_draft_share:
                break
            token_id, end, _ = follower
            token_ids.append(token_id)
            share *= follower.share
            num_expected += share
        return Guess(match.length if token_ids else 0, num_expected, token_ids)


class SuffixProposer:
    """Deterministic, so q is one-hot under `rejection` and does not matter under `greedy` and `coupled`."""

    def __init__(self, memory: SuffixMemory, length: DraftLength) -> None:
        self._memory = memory
        self._length = length

    @property
    def capabilities(self) -> ProposerCapabilities:
        return ProposerCapabilities(
            name="suffix",
            graph_safe=False,
            transports=frozenset({DraftProbsTransport.ONE_HOT, DraftProbsTransport.COUPLED}),
        )

    def propose(self, batch: Sequence[ProposeInput]) -> list[Proposal | None]:
        """Up to K tokens each, from where the longest end stood before; none without such a place.

        None for a session with a long prompt that has been read in part.
        """
        proposals: list[Proposal | None] = []
        num_left = _MAX_NEW_TOKENS
        for item in batch:
            token_ids = item.committed_token_ids
            reading = self._memory.open(item.session_key, item.spec.prompt_len, token_ids)
            if reading is None:
                proposals.append(Proposal())
                continue
            num_read = len(reading.token_ids)
            num_new = min(len(token_ids) - num_read, max(num_left, _ALWAYS_READ))
            num_left -= num_new
            self._memory.read(reading, token_ids[: num_read + num_new])
            is_done = len(reading.token_ids) == len(token_ids)
            proposals.append(self._draft(reading, item) if is_done else None)
        return proposals

    def forget(self, session_key: SessionKey) -> None:
        """The session's output is one of the earlier outputs from now on."""
        self._memory.forget(session_key)

    def kv_usage(self) -> DraftKvUsage | None:
        """No model, no key-value memory."""
        return None

    def _draft(self, reading: Reading, item: ProposeInput) -> Proposal:
        """From the best of the places where the session's end stood before; of equals its own tokens."""
        places = [self._memory.own_place(reading)]
        if item.spec.effective_policy in _POLICIES_WITH_OUTPUTS:
            places += self._memory.output_places(reading)
        guesses = (self._length.guess(text, match, item.num_draft_tokens) for text, match in places)
        best = max(guesses, key=lambda guess: (guess.match_len, guess.num_expected))
        return Proposal(tuple(best.token_ids))


def add_options(group: OptionGroup) -> None:
    """Add --max-suffix-tokens, --own-tokens-only, --drafts-per-match and --min-draft-share."""
    length = DraftLength()
    group.add_argument(
        "--max-suffix-tokens",
        type=int,
        default=_MAX_TOKENS,
        metavar="N",
        help="most tokens kept, of open requests and earlier outputs together; about 120 bytes each",
    )
    group.add_argument(
        "--own-tokens-only",
        action="store_true",
        help="keep no outputs: a request's drafts come from its own tokens and from nobody else's",
    )
    group.add_argument(
        "--drafts-per-match",
        type=float,
        default=length.drafts_per_match,
        metavar="N",
        help="most drafts for each token of the match",
    )
    group.add_argument(
        "--min-draft-share",
        type=float,
        default=length.min_draft_share,
        metavar="SHARE",
        help="drafts end where they followed less often than this",
    )


def load_suffix(settings: ProposerSettings) -> SuffixProposer:
    """Needs no model, and refuses one."""
    refuse_model(settings)
    options = settings.options
    memory = SuffixMemory(options.max_suffix_tokens, keeps_outputs=not options.own_tokens_only)
    return SuffixProposer(memory, DraftLength(options.drafts_per_match, options.min_draft_share))


KIND = ProposerKind(load_suffix, add_options)
