"""What stood after a sequence's last tokens when they stood before, for a sequence that grows and goes back.

Prompt lookup (tandem/prompt_lookup.py) searches for it once a round; a model that is told of it at every token needs
it kept.
"""

from dataclasses import dataclass

MAX_NGRAM_SIZE = 4


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The token that followed the right-most earlier place of the longest n-gram that ends here."""

    token_id: int = 0  # of no meaning where size is 0
    size: int = 0  # of the n-gram, 1 to MAX_NGRAM_SIZE; 0: not even the last token stood anywhere before


class NgramIndex:
    """Tokens, and for each of them its recurrence. About ten microseconds and at most 650 bytes a token.

    Nothing here bounds it: a head keeps one a session, of tokens that fit its model's context, until the session ends.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.recurrences: list[Recurrence] = []
        self._last: dict[tuple[int, ...], int] = {}  # an n-gram -> the index of its last token where it stood last
        self._before: list[list[int | None]] = []  # a token -> what `_last` had for the n-grams that end with it

    def append(self, token_id: int) -> None:
        """One token more."""
        self.token_ids.append(token_id)
        before, recurrence = [], Recurrence()
        for ngram in self._ending():
            place = self._last.get(ngram)
            before.append(place)
            if place is not None:  # the n-grams grow, so the longest is the last that was found
                recurrence = Recurrence(self.token_ids[place + 1], len(ngram))
            self._last[ngram] = len(self.token_ids) - 1
        self._before.append(before)
        self.recurrences.append(recurrence)

    def truncate(self, length: int) -> None:
        """Go back to the first `length` tokens."""
        while len(self.token_ids) > length:
            for ngram, place in zip(self._ending(), self._before.pop(), strict=True):
                if place is None:
                    del self._last[ngram]
                else:
                    self._last[ngram] = place
            self.token_ids.pop()
            self.recurrences.pop()

    def _ending(self) -> list[tuple[int, ...]]:
        """The n-grams that end with the last token, shortest first."""
        end = len(self.token_ids)
        return [tuple(self.token_ids[end - size :]) for size in range(1, min(MAX_NGRAM_SIZE, end) + 1)]
