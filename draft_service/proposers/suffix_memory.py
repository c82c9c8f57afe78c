"""What the `suffix` proposer has read: every open session's own tokens, and outputs of sessions that have ended.

Invariant: all automata together hold at most `max_tokens` tokens. An open session comes before the outputs of others,
the oldest of which go first; a session that finds no room even so is not kept, and tries again in its next round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from draft_service.proposers.base import SessionKey
from draft_service.proposers.draft_kv import common_prefix_len
from draft_service.proposers.suffix_automaton import NO_MATCH, SEPARATOR, Match, SuffixAutomaton

NUM_PARTS = 4  # an automaton is forgotten whole: so many of them hold the outputs, one of them at a time goes
_READ_BACK = 64  # tokens of a session that are looked up in a part it has not been compared with: its longest match


@dataclass(slots=True)
class Reading:
    """One session's tokens, and their longest end in each part of the outputs, by the part's number."""

    prompt_len: int
    token_ids: Sequence[int] = ()
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    found: dict[int, Match] = field(default_factory=dict)


class SuffixMemory:
    """Readings by session, and the outputs of earlier ones in numbered parts, the oldest first."""

    def __init__(self, max_tokens: int, *, keeps_outputs: bool) -> None:
        """Without `keeps_outputs` every session is read by itself. ValueError, naming the option, for no room."""
        if max_tokens < 1:
            raise ValueError(f"--max-suffix-tokens {max_tokens} is less than 1")
        self._max_tokens = max_tokens
        self._part_tokens = max_tokens // NUM_PARTS
        self._keeps_outputs = keeps_outputs
        self._readings: dict[SessionKey, Reading] = {}
        self._outputs: dict[int, SuffixAutomaton] = {}
        self._numbers = count()
        self._num_session_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Held now, in all automata."""
        return self._num_session_tokens + sum(map(len, self._outputs.values()))

    def open(self, key: SessionKey, prompt_len: int, token_ids: Sequence[int]) -> Reading | None:
        """The session's reading, of a part of `token_ids` from their start on; None without room for all of them.

        A reading of other tokens is dropped: an automaton cannot go back.
        """
        reading = self._readings.get(key)
        if reading is None or common_prefix_len(reading.token_ids, token_ids) < len(reading.token_ids):
            self._drop(key)
            reading = self._readings[key] = Reading(prompt_len)
        if not self._make_room(len(token_ids) - len(reading.token_ids)):
            self._drop(key)
            return None
        return reading

    def read(self, reading: Reading, token_ids: Sequence[int]) -> None:
        """Take an opened reading on to more of the tokens it was opened for."""
        tail = token_ids[len(reading.token_ids) :]
        self._num_session_tokens += len(tail)
        for token_id in tail:
            reading.own.append(token_id)
        found = {}
        for number, part in self._outputs.items():
            match, unread = NO_MATCH, token_ids[-_READ_BACK:]
            if number in reading.found:
                match, unread = reading.found[number], tail
            for token_id in unread:
                match = part.advance(match, token_id)
            found[number] = match
        reading.token_ids, reading.found = token_ids, found

    def own_place(self, reading: Reading) -> tuple[SuffixAutomaton, Match]:
        """Where the session's end stood before in its own tokens."""
        return reading.own, reading.own.repeated()

    def output_places(self, reading: Reading) -> list[tuple[SuffixAutomaton, Match]]:
        """Where a session that has just been read finds its end in the outputs, the newest part first."""
        return [(part, reading.found[number]) for number, part in reversed(self._outputs.items())]

    def forget(self, key: SessionKey) -> None:
        """The session has ended: its output, as far as it was read, goes to the outputs; a no-op for an unknown one."""
        reading = self._drop(key)
        if reading is None or not self._keeps_outputs:
            return
        most = self._part_tokens - 1  # with the separator
        output = reading.token_ids[max(reading.prompt_len, len(reading.token_ids) - most) :]
        if output and self._make_room(len(output) + 1):
            part = self._part_with_room(len(output) + 1)
            for token_id in (*output, SEPARATOR):
                part.append(token_id)

    def _part_with_room(self, num_tokens: int) -> SuffixAutomaton:
        """The newest part, or a new one where that has not so much room left."""
        newest = max(self._outputs, default=None)
        if newest is None or len(self._outputs[newest]) + num_tokens > self._part_tokens:
            newest = next(self._numbers)
            self._outputs[newest] = SuffixAutomaton()
        return self._outputs[newest]

    def _make_room(self, num_tokens: int) -> bool:
        """Whether there is room for so many tokens more, made by forgetting outputs where that is enough."""
        if self._num_session_tokens + num_tokens > self._max_tokens:
            return False
        while self.num_tokens + num_tokens > self._max_tokens:
            del self._outputs[min(self._outputs)]
        return True

    def _drop(self, key: SessionKey) -> Reading | None:
        reading = self._readings.pop(key, None)
        if reading is not None:
            self._num_session_tokens -= len(reading.token_ids)
        return reading
