"""A draft service beside a model that knows neither blocks nor batches: every item's answer is compared."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from draft_service.limits import IDLE_S, DraftLimits
from draft_service.service import DraftStream, Result
from draft_service.sessions import Step
from engine.backends.toy_backend import ToyEngine
from tandem.serving.items import Closed, Opened
from tandem.types import ErrorCode, ItemError, Proposal, SessionSpec, Stamp
from tests.draft.bench import LOGITS, SPECS, Bench, free_drafts, taken
from tests.draft.support import VOCAB, make_spec
from tests.items import stamp

LEASE_S, MAX_SESSIONS, MAX_BATCH, MAX_DRAFTS, STEP_TOKENS, MAX_TOKENS = 60.0, 4, 3, 5, 7, 60
AMPLE = 400  # blocks; enough for everybody
BASE = (1, 2, 3, 1, 2, 3, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
PROMPTS = (BASE[:1], BASE[:7], BASE[:16], BASE, (*BASE[:8], 30, 31, 30))


class Pressure(NamedTuple):
    """How little there is."""

    num_blocks: int
    block_size: int
    prefix_cache: bool
    max_context: int = 200


@dataclass
class Expected:
    """What one session should be."""

    epoch: int
    kind: str
    spec: SessionSpec
    tokens: list[int]
    used_s: float
    round: int = 0
    wanted: int = 0  # drafts of the round, once it is known that some can be of use
    answer: Proposal | None = None
    drafts: list[int] = field(default_factory=list)  # the last ones

    @property
    def is_busy(self) -> bool:
        return self.round > 0 and self.answer is None

    def idle_since_s(self, now_s: float) -> float:
        return now_s if self.is_busy else self.used_s


class CheckedService:
    """Two streams with sessions 1 to 3 each; a place is a stream and a session."""

    def __init__(self, pressure: Pressure) -> None:
        self.pressure = pressure
        engine = ToyEngine(
            LOGITS,
            VOCAB,
            num_blocks=pressure.num_blocks,
            block_size=pressure.block_size,
            prefix_cache=pressure.prefix_cache,
            max_context=pressure.max_context,
        )
        limits = DraftLimits(MAX_DRAFTS, MAX_SESSIONS, MAX_BATCH, LEASE_S)
        self.bench = Bench(engine, limits, STEP_TOKENS)
        self.streams: list[DraftStream] = [self.bench.call(self.bench.service.open_stream) for _ in range(2)]
        self.known: dict[tuple[int, int], Expected] = {}
        self.num_stale = self.num_ended = 0
        for place in ((0, 1), (0, 2), (1, 1)):
            self.open(place, 1, PROMPTS[sum(place)], "greedy", is_corrupt=False)

    @property
    def now_s(self) -> float:
        return self.bench.loop.now_s

    def open(
        self, place: tuple[int, int], change: int, prompt: tuple[int, ...], kind: str, is_corrupt: bool
    ) -> None:
        """A first open, a repeat, a late one, or one with every token so far."""
        known = self.known.get(place)
        epoch = max(0, (known.epoch if known else 1) + change)
        spec = replace(SPECS[kind](prompt), max_tokens=MAX_TOKENS)
        if known is not None:
            kind, spec = known.kind, replace(known.spec, token_ids=tuple(known.tokens))
        made_for = self.stamp(place, spec.token_ids, 0, epoch)
        if is_corrupt:
            made_for = replace(made_for, prefix_hash=made_for.prefix_hash ^ 1)
        results = self.send(place, "open_session", made_for, spec, self.now_s)
        if known is not None and epoch < known.epoch:
            self.num_stale += 1
            assert results == []
        elif known is not None and epoch == known.epoch:
            assert results == [Result(made_for, Opened())]
        elif is_corrupt:
            assert code_of(results) is ErrorCode.PREFIX_MISMATCH
        elif known is None and not self.has_room():
            assert code_of(results) is ErrorCode.NO_CAPACITY
        else:
            assert results == [Result(made_for, Opened())]
            self.num_stale += known is not None and known.is_busy
            self.known[place] = Expected(epoch, kind, spec, list(spec.token_ids), self.now_s)

    def has_room(self) -> bool:
        """Whether one more may be opened, after the one that has been idle for longest has made room if it must."""
        if len(self.known) < MAX_SESSIONS:
            return True
        # Of several that are idle for equally long any may go: ask which one did.
        longest = min(known.idle_since_s(self.now_s) for known in self.known.values())
        if longest + IDLE_S > self.now_s:
            return False
        (ended,) = self.gone()
        assert self.known[ended].idle_since_s(self.now_s) == longest
        self.ended(ended)
        return True

    def gone(self) -> list[tuple[int, int]]:
        """Sessions that the model knows and the service does not."""
        held = [{session.session_id for session in stream.table.sessions} for stream in self.streams]
        return [place for place in self.known if place[1] not in held[place[0]]]

    def ended(self, place: tuple[int, int]) -> None:
        del self.known[place]
        self.num_ended += 1

    def propose(
        self, place: tuple[int, int], num_accepted: int, other: int, k: int, tail: int, back: int, odd: str
    ) -> None:
        """A round after some accepted drafts and one more token, or after going back, or one with a fault."""
        subject = self.known.get(place) or Expected(1, "greedy", SPECS["greedy"]((1,)), [1], 0.0)
        base = subject.tokens[: max(subject.spec.prompt_len, len(subject.tokens) - back)]
        tokens = [*base, *(subject.drafts[:num_accepted] if not back else []), other][: subject.spec.max_len]
        if odd in ("retry", "corrupt repeat"):
            tokens = list(subject.tokens)
        number = subject.round + {"retry": 0, "corrupt repeat": 0, "repeat elsewhere": 0, "late round": -1}.get(
            odd, 1
        )
        epoch = subject.epoch + {"late epoch": -1, "next epoch": 1}.get(odd, 0)
        made_for = self.stamp(place, tokens, number, epoch)
        if odd in ("corrupt", "corrupt repeat"):
            made_for = replace(made_for, prefix_hash=made_for.prefix_hash ^ 1)
        tail_start = min(tail, len(base))
        if odd == "past":
            tail_start = len(subject.tokens) + 1
            tokens = [*tokens, *[0] * 9][: max(tail_start, len(tokens))]
            made_for = self.stamp(place, tokens, number, epoch)
        step = Step(tail_start, tuple(tokens[tail_start:]))
        results = self.send(place, "propose", made_for, step, k, self.now_s)
        self.check_round(place, made_for, tokens, k, odd, results)

    def check_round(
        self, place: tuple[int, int], made_for: Stamp, tokens: list[int], k: int, odd: str, results: list[Result]
    ) -> None:
        known = self.known.get(place)
        if known is None or made_for.epoch > known.epoch:
            assert code_of(results) is ErrorCode.UNKNOWN_SESSION
        elif made_for.round < 1:
            assert code_of(results) is ErrorCode.INVALID_ARGUMENT
        elif made_for.epoch < known.epoch or made_for.round < known.round:
            self.num_stale += 1
            assert results == []
        elif made_for.round == known.round:
            known.used_s = self.now_s
            if made_for != self.stamp(place, known.tokens, made_for.round, made_for.epoch):
                assert code_of(results) is ErrorCode.PREFIX_MISMATCH
            else:
                assert [result.outcome for result in results] == (
                    [known.answer] if known.answer is not None else []
                )
        elif odd in ("corrupt", "past"):
            known.used_s = self.now_s
            is_short = len(tokens) > known.spec.max_len
            assert code_of(results) is (ErrorCode.INVALID_ARGUMENT if is_short else ErrorCode.PREFIX_MISMATCH)
        else:
            self.begin(known, made_for, tokens, k, results)

    def begin(self, known: Expected, made_for: Stamp, tokens: list[int], k: int, results: list[Result]) -> None:
        # A round that waits is found to be stale when its batch is formed, one in work when it is delivered.
        self.num_stale += known.is_busy
        known.tokens, known.round, known.answer, known.used_s = tokens, made_for.round, None, self.now_s
        known.wanted = max(0, min(k, MAX_DRAFTS, known.spec.max_len - len(tokens) - 1))
        known.drafts = []
        if known.wanted == 0:
            known.answer = Proposal()
            assert [result.outcome for result in results] == [Proposal()]
        else:
            assert results == []

    def close(self, place: tuple[int, int], is_late: bool) -> None:
        known = self.known.get(place)
        made_for = self.stamp(place, (), 0, (known.epoch if known else 1) - is_late)
        results = self.send(place, "close_session", made_for)
        if known is not None and is_late:
            self.num_stale += 1
            assert results == []
        else:
            assert results == [Result(made_for, Closed())]
            if known is not None:
                self.num_stale += known.is_busy
                del self.known[place]

    def end_stream(self, index: int) -> None:
        """A peer goes, and another comes."""
        self.bench.call(self.streams[index].end)
        self.streams[index] = self.bench.call(self.bench.service.open_stream)
        for place in [place for place in self.known if place[0] == index]:
            self.num_stale += self.known.pop(place).is_busy

    def pass_time(self, seconds: float, is_settled: bool) -> None:
        if is_settled:
            self.settle()
        self.bench.loop.now_s += seconds
        self.turn()
        over = [
            place for place, known in self.known.items() if known.idle_since_s(self.now_s) + LEASE_S <= self.now_s
        ]
        assert sorted(self.gone()) == sorted(over)
        for place in over:
            self.ended(place)

    def go_on(self) -> None:
        """Let one batch be computed, or the one that was computed be delivered."""
        self.bench.compute.go_on()
        self.turn()

    def settle(self) -> None:
        self.bench.settle()
        self.take_answers()
        assert not any(known.is_busy for known in self.known.values())
        assert self.bench.service.load.stale_items == self.num_stale
        live = {session.key for stream in self.streams for session in stream.table.sessions}
        assert set(self.bench.proposer.kv._sequences) <= live
        self.bench.check_load()

    def turn(self) -> None:
        self.bench.turn()
        self.take_answers()

    def take_answers(self) -> None:
        """Of rounds: what anybody would draft, or the first of it where something is short."""
        for index, stream in enumerate(self.streams):
            for result in taken(stream):
                known = self.known[index, int(result.stamp.session_id)]
                assert known.is_busy
                assert (result.stamp.epoch, result.stamp.round) == (known.epoch, known.round)
                assert isinstance(result.outcome, Proposal)
                drafts = result.outcome.draft_token_ids
                free = free_drafts(known.kind, known.spec.token_ids, tuple(known.tokens), known.wanted)
                assert drafts == free[: len(drafts)]
                if self.pressure.num_blocks == AMPLE:
                    assert len(drafts) == max(
                        0, min(known.wanted, self.pressure.max_context - len(known.tokens) + 1)
                    )
                known.answer, known.drafts, known.used_s = result.outcome, list(drafts), self.now_s

    def send(self, place: tuple[int, int], method: str, made_for: Stamp, *rest: object) -> list[Result]:
        """One item -> its immediate answers; whatever the loop does about it comes later."""
        stream = self.streams[place[0]]

        def act() -> None:
            with stream.answering(made_for):
                getattr(stream, method)(made_for, *rest)

        return self.bench.results_of(stream, act)

    def stamp(self, place: tuple[int, int], tokens: object, number: int, epoch: int) -> Stamp:
        return replace(stamp(tokens, number, place[1]), epoch=epoch)  # type: ignore[arg-type]

    def sessions_are_as_expected(self) -> None:
        service = self.bench.service
        assert service.num_sessions == len(self.known) <= MAX_SESSIONS
        assert service.load.evicted_sessions == self.num_ended
        for (index, session_id), known in self.known.items():
            session = self.streams[index].table._sessions[session_id]  # type: ignore[index]
            assert list(session.tokens.token_ids) == known.tokens
            assert (session.epoch, session.round, session.is_busy) == (known.epoch, known.round, known.is_busy)

    def drain(self) -> None:
        """Drain: nothing is opened any more, and once the sessions are closed nothing is in use."""
        draining = self.bench.call(asyncio.ensure_future, self.bench.service.drain(1e6))
        self.turn()
        if self.known:
            results = self.send((0, 9), "open_session", self.stamp((0, 9), (1,), 0, 1), make_spec((1,)), self.now_s)
            assert code_of(results) is ErrorCode.NO_CAPACITY
        for place in list(self.known):
            assert not draining.done()
            self.close(place, is_late=False)
        self.settle()
        assert draining.done()
        assert self.bench.engine.kv_usage().used_blocks == 0
        assert self.bench.engine.sequence_ids == []


def code_of(results: list[Result]) -> ErrorCode:
    (result,) = results
    assert isinstance(result.outcome, ItemError), result
    return result.outcome.code
