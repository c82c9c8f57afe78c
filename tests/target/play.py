"""Whole requests through table and engine, many at a time, as orchestrators would send them; stepped by hand."""

from collections.abc import Callable, Mapping, Sequence

from engine.backends.toy_backend import LogitsOf
from tandem.serving.items import Closed, Opened
from tandem.types import ItemError, SessionSpec, Verdict
from target_service.answers import Answer, StreamId
from tests.target.harness import LOGITS, STREAM, Bench, DraftsOf, plain_decode, stamp


class Play:
    """Requests that open, ask the next round as soon as they have a verdict, and close at their end.

    `tokens` by session id; `outputs` of those that have ended. A request that is refused raises.
    """

    def __init__(self, bench: Bench, drafts_of: DraftsOf | None = None, most_drafts: int = 4) -> None:
        self.bench = bench
        self.tokens: dict[int, list[int]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.verdicts: dict[int, list[Verdict]] = {}
        self.opened: list[int] = []  # in the order they were admitted
        self.num_steps = 0
        self._drafts_of = drafts_of or (lambda tokens, most: ())
        self._most_drafts = most_drafts
        self._specs: dict[int, SessionSpec] = {}
        self._streams: dict[int, StreamId] = {}
        self._rounds: dict[int, int] = {}
        self._num_seen = len(bench.answers)
        self._num_others = len(bench.table)

    def begin(self, session: SessionSpec, number: int, stream: StreamId = STREAM) -> None:
        """Open a session and ask its first round."""
        self._specs[number], self._streams[number] = session, stream
        self.tokens[number], self.verdicts[number], self._rounds[number] = list(session.token_ids), [], 0
        self.bench.open(session, number, stream=stream)
        self._take_answers()
        self._ask(number)

    def step(self) -> int:
        """One step and the rounds that follow from it -> how many sessions took part; the accounting closes."""
        num_parts = self.bench.step()
        self.num_steps += 1
        usage = self.bench.engine.kv_usage()
        assert usage.free_blocks + usage.used_blocks + usage.cached_blocks == usage.total_blocks
        self._take_answers()
        return num_parts

    def run(self, most_steps: int = 10_000) -> dict[int, list[int]]:
        """Steps until all requests have ended -> their outputs; then nothing of them is left."""
        while len(self.outputs) < len(self.tokens):
            self.step()
            assert self.num_steps < most_steps
        self.bench.settle()
        assert len(self.bench.table) == self._num_others
        if self._num_others == 0:
            assert self.bench.table.is_empty
            assert (self.bench.used_blocks(), self.bench.engine.sequence_ids) == (0, [])
        return self.outputs

    def _take_answers(self) -> None:
        new, self._num_seen = self.bench.answers[self._num_seen :], len(self.bench.answers)
        for _, answer in new:
            self._take(int(answer.stamp.session_id), answer)

    def _take(self, number: int, answer: Answer) -> None:
        outcome = answer.outcome
        if isinstance(outcome, ItemError):
            raise outcome
        if outcome == Opened():
            self.opened.append(number)
        if outcome == Closed() or not isinstance(outcome, Verdict):
            return
        self.tokens[number] += outcome.token_ids
        self.verdicts[number].append(outcome)
        if outcome.finish_reason is None:
            self._ask(number)
        else:
            self.outputs[number] = self.tokens[number][self._specs[number].prompt_len :]
            self.bench.close(stamp(self.tokens[number], 0, number), self._streams[number])

    def _ask(self, number: int) -> None:
        self._rounds[number] += 1
        tokens, drafts = self.tokens[number], self._drafts_of(self.tokens[number], self._most_drafts)
        mark = stamp(tokens, self._rounds[number], number)
        error = self.bench.submit(mark, drafts, self._streams[number])  # type: ignore[arg-type]
        assert error is None, error


def play(
    bench: Bench, sessions: Mapping[int, SessionSpec], drafts_of: DraftsOf | None = None, most_drafts: int = 4
) -> Play:
    """All sessions from the beginning, at once, to their ends."""
    played = Play(bench, drafts_of, most_drafts)
    for number, session in sessions.items():
        played.begin(session, number)
    played.run()
    return played


def right_drafts(sessions: Mapping[int, SessionSpec], logits_of: LogitsOf = LOGITS) -> DraftsOf:
    """Drafts that are all accepted, for sessions that no two have equal prompts with different outputs."""
    whole = [[*session.token_ids, *plain_decode(session, logits_of)] for session in sessions.values()]

    def drafts_of(tokens: Sequence[int], most: int) -> Sequence[int]:
        (known, *_) = (text for text in whole if text[: len(tokens)] == list(tokens))
        return known[len(tokens) : len(tokens) + most]

    return drafts_of


def mixed_drafts(right: DraftsOf, num_right: Callable[[int], int]) -> DraftsOf:
    """The first `num_right(len(tokens))` drafts are right, the others are not."""

    def drafts_of(tokens: Sequence[int], most: int) -> Sequence[int]:
        drafts = list(right(tokens, most))  # type: ignore[arg-type]
        kept = num_right(len(tokens))
        return [*drafts[:kept], *((draft + 1) % 30 for draft in drafts[kept:])]

    return drafts_of
