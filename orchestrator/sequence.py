"""One request's tokens and text, and how they grow by a round.

The sequence is what is committed: prompt, then output. Its end is derived from its own tokens and text, so that
token ids, text, usage and finish reason agree, and nothing is emitted after the end whatever a verdict carries.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from orchestrator.speculation_stats import SpeculationStats
from orchestrator.text_stream import TextStream
from tandem.prefix_hash import HashedTokens
from tandem.types import DraftProbsTransport, FinishReason, Proposal, SessionSpec, TokenLogprobs, Verdict


class BadVerdictError(Exception):
    """A verdict that no correct target sends; the message says what is wrong. Nothing of it may be emitted."""


@dataclass(frozen=True, slots=True)
class RoundOutput:
    """What one round adds to the answer. The text may lag behind the tokens until the last round."""

    token_ids: tuple[int, ...]
    text: str
    num_draft_tokens: int
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token when the session asked, else empty


class Sequence:
    """Committed tokens, the current round's number, text, figures, and how the generation ended."""

    def __init__(
        self,
        spec: SessionSpec,
        text: TextStream,
        *,
        num_draft_tokens: int,
        vocab_size: int,
        started_at: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is generated yet.

        Args:
            num_draft_tokens: most drafts a round.
            vocab_size: ids the target may answer with are below it.
            started_at: when the request arrived, in seconds of `clock`; now when None.
        """
        self.tokens = HashedTokens(spec.token_ids)
        self.round = 1
        self.stats = SpeculationStats()
        self.finish_reason: FinishReason | None = None
        self.matched_token_id: int | None = None
        self.num_cached_tokens = 0  # of the prompt, in the target's prefix cache
        self._started_at = clock() if started_at is None else started_at
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self.last_round_s = 0.0  # from the tokens before to those of the last round; 0 for the first round
        self._spec = spec
        self._text = text
        self._num_draft_tokens = num_draft_tokens
        self._vocab_size = vocab_size
        self._clock = clock

    @property
    def sample_index(self) -> int:
        """Which of the request's answers this is."""
        return self._spec.sample_index

    @property
    def draft_probs_transport(self) -> DraftProbsTransport:
        """How the draft's distribution travels."""
        return self._spec.draft_probs_transport

    @property
    def num_prompt_tokens(self) -> int:
        return self._spec.prompt_len

    @property
    def num_completion_tokens(self) -> int:
        return len(self.tokens) - self._spec.prompt_len

    @property
    def num_tokens_left(self) -> int:
        """Tokens until max_tokens."""
        return self._spec.max_len - len(self.tokens)

    @property
    def matched_stop_string(self) -> str | None:
        """The stop string that ended the generation."""
        return self._text.matched_stop

    @property
    def time_to_first_token_s(self) -> float:
        """From the request's arrival; 0 before the first token."""
        return 0.0 if self._first_token_at is None else self._first_token_at - self._started_at

    @property
    def generation_s(self) -> float:
        """From the first token to the last so far."""
        if self._first_token_at is None or self._last_token_at is None:
            return 0.0
        return self._last_token_at - self._first_token_at

    def resume(self, token_ids: Iterable[int]) -> None:
        """Begin with tokens that an application has already, and their text; ValueError for one after the end."""
        for token_id in token_ids:
            if self.finish_reason is not None:
                raise ValueError(f"token {token_id} comes after the end of the answer")
            self._append(token_id)
        self._take_text()

    def session_spec(self) -> SessionSpec:
        """What opens a session that continues from here."""
        return replace(self._spec, token_ids=tuple(self.tokens.token_ids))

    def num_draft_tokens(self) -> int:
        """Most drafts this round can use: the round's last token is the target's own."""
        return max(0, min(self._num_draft_tokens, self.num_tokens_left - 1))

    def skip_round(self) -> None:
        """Give up the current round's number, so that another proposal can be verified in its place."""
        self.round += 1

    def commit(self, proposal: Proposal, verdict: Verdict) -> RoundOutput:
        """Append the verdict's tokens up to the end of the generation; BadVerdictError for one that cannot be."""
        self._check(proposal, verdict)
        start = len(self.tokens)
        for token_id in verdict.token_ids:
            self._append(token_id)
            if self.finish_reason is not None:
                break
        token_ids = tuple(self.tokens.token_ids[start:])
        if verdict.finish_reason is not None and self.finish_reason is None:
            raise BadVerdictError(f"it ends the generation ({verdict.finish_reason.name}) where nothing ends it")
        num_drafted = verdict.num_draft_tokens
        if self.finish_reason is not None:  # drafts past the end were neither kept nor refused
            num_drafted = min(num_drafted, len(token_ids))
        num_accepted = min(verdict.num_accepted, num_drafted)
        self.stats.count_round(num_drafted, num_accepted)
        self.round += 1
        before, self._last_token_at = self._last_token_at, self._clock()
        self.last_round_s = 0.0 if before is None else self._last_token_at - before
        if self._first_token_at is None:
            self._first_token_at = self._last_token_at
            self.num_cached_tokens = min(verdict.num_cached_tokens, self.num_prompt_tokens)
        logprobs = verdict.logprobs[: len(token_ids)]
        return RoundOutput(token_ids, self._take_text(), num_drafted, num_accepted, logprobs)

    def _append(self, token_id: int) -> None:
        """Add one token and see whether it ends the generation."""
        may_stop = self.num_completion_tokens >= self._spec.min_tokens
        self.tokens.extend((token_id,))
        matched_stop = self._text.push(token_id, may_stop)
        if may_stop and token_id in self._spec.ending_token_ids:
            self.finish_reason = FinishReason.STOP
            self.matched_token_id = token_id
        elif matched_stop is not None:
            self.finish_reason = FinishReason.STOP
        elif self.num_tokens_left == 0:
            self.finish_reason = FinishReason.LENGTH

    def _take_text(self) -> str:
        """The text that may be emitted now; at the end all that is left, which may complete a stop string."""
        if self.finish_reason is None:
            return self._text.take()
        text = self._text.finish()
        if self._text.matched_stop is not None:
            self.finish_reason = FinishReason.STOP
        return text

    def _check(self, proposal: Proposal, verdict: Verdict) -> None:
        """Raise BadVerdictError unless the verdict's counts and ids can be."""
        num_proposed, num_tokens = len(proposal.draft_token_ids), len(verdict.token_ids)
        num_accepted = verdict.num_accepted
        if not num_accepted <= verdict.num_draft_tokens <= num_proposed:
            raise BadVerdictError(
                f"{num_accepted} accepted of {verdict.num_draft_tokens} verified of {num_proposed} proposed"
            )
        if num_tokens not in (num_accepted, num_accepted + 1) or not 1 <= num_tokens <= self.num_tokens_left:
            raise BadVerdictError(
                f"{num_tokens} tokens with {num_accepted} accepted drafts and {self.num_tokens_left} tokens left"
            )
        if num_tokens == num_accepted and verdict.finish_reason is None:
            raise BadVerdictError(f"the token after {num_accepted} accepted drafts is missing")
        if verdict.token_ids[:num_accepted] != proposal.draft_token_ids[:num_accepted]:
            raise BadVerdictError("its accepted tokens are not the proposed ones")
        for token_id in verdict.token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise BadVerdictError(f"token id {token_id} is outside 0..{self._vocab_size - 1}")
        num_logprobs = 0 if self._spec.logprobs is None else num_tokens
        if len(verdict.logprobs) != num_logprobs:
            raise BadVerdictError(f"{len(verdict.logprobs)} logprobs where {num_logprobs} are due")
