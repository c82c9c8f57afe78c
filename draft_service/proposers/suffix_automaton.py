"""A suffix automaton that counts: every stretch of a text, where it goes on, and how often.

An automaton rather than a tree with counts: it takes one token at a time in amortised O(1) and at most two states a
token, whatever the depth of a match, and the longest end of the text that stood in it before is simply a link of
its last state (Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985). A counting tree adds
a token below each of its last D contexts, D times the work and up to D times the memory. What an automaton cannot do is
lose its oldest tokens; whoever has to forget keeps several (suffix_memory.py).

A state stands for stretches that end at the same places, each an end of the longer ones. Its link leads to the longest
shorter end that stands at more places.
"""

from array import array
from collections.abc import Iterator
from typing import NamedTuple

SEPARATOR = -1  # between texts that have nothing to do with each other; never followed
_NO_TOKEN = -2
_NO_STATE = -1
_ROOT = 0
_MAX_COUNTED = 32  # states a token counts in, the longest stretches first; only periodic text has more


class Match(NamedTuple):
    """A stretch of the text."""

    state: int
    length: int  # in tokens


NO_MATCH = Match(_ROOT, 0)


class Follower(NamedTuple):
    """What comes after a stretch most often; of equals, what came last."""

    token_id: int
    match: Match  # the stretch and this token
    share: float  # of the stretch's continuations, in (0, 1]


class SuffixAutomaton:
    """Of the tokens appended so far; about 120 bytes a token of ordinary text."""

    def __init__(self) -> None:
        self._len, self._link = array("i"), array("i")  # longest stretch; the state of shorter ends
        self._count, self._last_end = array("i"), array("i")  # places where it ends, and the last of them
        self._token, self._target = array("q"), array("i")  # the first transition; most states have no other
        self._others: dict[int, dict[int, int]] = {}  # the other transitions of those that have more
        self._num_tokens = 0
        self._end = self._add_state(0)  # the state of the whole text
        self._link[_ROOT] = _NO_STATE

    def __len__(self) -> int:
        return self._num_tokens

    def append(self, token_id: int) -> None:
        """One more token, SEPARATOR among them; amortised O(1)."""
        self._num_tokens += 1
        added = self._add_state(self._len[self._end] + 1)
        state, target = self._end, _NO_STATE
        while state != _NO_STATE and (target := self._target_of(state, token_id)) == _NO_STATE:
            self._set_target(state, token_id, added)
            state = self._link[state]
        if state != _NO_STATE:
            self._link[added] = self._exactly(state, token_id, target)
        self._end = added
        self._count_end(added)

    def repeated(self) -> Match:
        """The longest end of the text that also stands in it before; it may overlap itself."""
        state = max(self._link[self._end], _ROOT)
        return Match(state, self._len[state])

    def advance(self, match: Match, token_id: int) -> Match:
        """The longest end of the match that stands in the text with this token after it; matches outlive appends."""
        state, length = self._state_of(match), match.length
        while (target := self._target_of(state, token_id)) == _NO_STATE:
            if state == _ROOT:
                return NO_MATCH
            state = self._link[state]
            length = self._len[state]
        return Match(target, length + 1)

    def follower(self, match: Match) -> Follower | None:
        """What follows the match or, where nothing does, its longest end that something follows; None without any."""
        state, length = self._state_of(match), match.length
        while state != _ROOT:
            # each of them: how often, where last
            followers = [
                (self._count[target], self._last_end[target], token_id, target)
                for token_id, target in self._transitions(state)
                if token_id != SEPARATOR
            ]
            if followers:
                count, _, token_id, target = max(followers)
                total = sum(follower[0] for follower in followers)
                return Follower(token_id, Match(target, length + 1), count / total)
            state = self._link[state]
            length = self._len[state]
        return None

    def _state_of(self, match: Match) -> int:
        """The match's state now: appends since may have moved its shorter stretches to a state of their own."""
        state = match.state
        while state != _ROOT and match.length <= self._len[self._link[state]]:
            state = self._link[state]
        return state

    def _exactly(self, state: int, token_id: int, target: int) -> int:
        """The state whose longest stretch is that of `state` and the token: the target, or a part of it split off."""
        length = self._len[state] + 1
        if self._len[target] == length:
            return target
        part = self._add_state(length)
        for values in (self._link, self._count, self._last_end, self._token, self._target):
            values[part] = values[target]
        if target in self._others:
            self._others[part] = dict(self._others[target])
        while state != _NO_STATE and self._target_of(state, token_id) == target:
            self._set_target(state, token_id, part)
            state = self._link[state]
        self._link[target] = part
        return part

    def _count_end(self, state: int) -> None:
        """The text's new end stands in all states along the links."""
        for _ in range(_MAX_COUNTED):
            if state == _ROOT:
                return
            self._count[state] += 1
            self._last_end[state] = self._num_tokens
            state = self._link[state]

    def _add_state(self, length: int) -> int:
        self._len.append(length)
        for values in (self._link, self._count, self._last_end):
            values.append(0)
        self._token.append(_NO_TOKEN)
        self._target.append(_NO_STATE)
        return len(self._len) - 1

    def _transitions(self, state: int) -> Iterator[tuple[int, int]]:
        if self._token[state] != _NO_TOKEN:
            yield self._token[state], self._target[state]
            yield from self._others.get(state, {}).items()

    def _target_of(self, state: int, token_id: int) -> int:
        if self._token[state] == token_id:
            return self._target[state]
        others = self._others.get(state)
        return _NO_STATE if others is None else others.get(token_id, _NO_STATE)

    def _set_target(self, state: int, token_id: int, target: int) -> None:
        if self._token[state] in (_NO_TOKEN, token_id):
            self._token[state], self._target[state] = token_id, target
        else:
            self._others.setdefault(state, {})[token_id] = target
