"""The text of one answer: its tokens, detokenised as they come, up to the first stop string."""

from collections.abc import Sequence

from orchestrator.detokenizer import IncrementalDetokenizer
from orchestrator.stop_strings import StopMatcher
from tandem.vocabulary import Vocabulary


class TextStream:
    """Push tokens one by one, take the text that is safe to emit at any time, finish once.

    The answer continues its prompt, so a leading space is kept. Special tokens have no text. Text that may turn
    out to be the beginning of a stop string is held back. Everything taken, `finish` included, joins to the
    text of the pushed tokens, cut before the first stop string (after it with `include_stop`).
    """

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str] = (), include_stop: bool = False) -> None:
        self._detokenizer = IncrementalDetokenizer(vocabulary, at_start=False)
        self._matcher = StopMatcher(stops)
        self._include_stop = include_stop
        self._pending = ""  # not taken yet; its end may be held back
        self._is_searched = True  # the last token's text
        self._is_finished = False
        self.matched_stop: str | None = None

    def push(self, token_id: int, may_stop: bool = True) -> str | None:
        """Add one token; the stop string it completes, if it does.

        The token that completes a stop string is the answer's last: `ValueError` for any later one. Without
        `may_stop`, for an answer's first `min_tokens` tokens, the token's text is not searched.
        """
        if self._is_finished or self.matched_stop is not None:
            raise ValueError(f"token {token_id} was pushed after the end of its text")
        self._is_searched = may_stop
        self._append(self._detokenizer.push((token_id,)))
        return self.matched_stop

    def take(self) -> str:
        """The text that became safe to emit since the last call."""
        is_final = self._is_finished or self.matched_stop is not None
        num_held = 0 if is_final else self._matcher.num_held_characters
        num_safe = len(self._pending) - num_held
        safe, self._pending = self._pending[:num_safe], self._pending[num_safe:]
        return safe

    def finish(self) -> str:
        """All text that is left: no more tokens come, so nothing needs to be held back."""
        if not self._is_finished and self.matched_stop is None:
            self._append(self._detokenizer.flush())
        self._is_finished = True
        return self.take()

    def _append(self, delta: str) -> None:
        """Match `delta` against the stop strings and add what is the answer's to the pending text."""
        match = self._matcher.push(delta) if self._is_searched else None
        if match is None:
            self._pending += delta
            return
        self.matched_stop = match.stop
        self._pending += delta[: match.end]
        if not self._include_stop:
            self._pending = self._pending[: len(self._pending) - len(match.stop)]
