"""Find stop strings in a growing text.

One Knuth-Morris-Pratt automaton a stop string walks the text character by character, so the answer depends on
the text alone and never on how it was cut into deltas, and no text is looked at twice.
Source: Knuth, Morris, Pratt, "Fast pattern matching in strings", 1977.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop string found, and how many characters of the pushed text come before its end."""

    stop: str
    end: int


class StopMatcher:
    """The first stop string to be complete in the text wins; of those complete at one character, the longest.

    Raises `ValueError` for an empty stop string, which would be complete before any text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=len, reverse=True)]

    def push(self, text: str) -> StopMatch | None:
        """Read `text` up to the end of the first match; the matcher must not be pushed after a match."""
        for index, character in enumerate(text):
            complete = [automaton.stop for automaton in self._automata if automaton.step(character)]
            if complete:
                return StopMatch(complete[0], index + 1)
        return None

    @property
    def num_held_characters(self) -> int:
        """Characters at the text's end that may begin a stop string; fewer than the longest one has."""
        return max((automaton.matched for automaton in self._automata), default=0)


class _Automaton:
    """`matched` is the length of the longest prefix of `stop` the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _fallback_lengths(stop)

    def step(self, character: str) -> bool:
        """Read one character; whether the stop string is complete now."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.stop[self.matched] == character
        return self.matched == len(self.stop)


def _fallback_lengths(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper prefix that is also its suffix."""
    lengths = [0] * len(stop)
    matched = 0
    for index in range(1, len(stop)):
        while matched and stop[matched] != stop[index]:
            matched = lengths[matched - 1]
        matched += stop[matched] == stop[index]
        lengths[index] = matched
    return lengths
