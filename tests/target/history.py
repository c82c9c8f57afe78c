"""Histories of the target: any order of items, steps and ends, beside a model that knows only plain decoding."""

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tandem.serving.items import Closed, Opened
from tandem.types import ErrorCode, ItemError, Proposal, Stamp, Verdict
from target_service.answers import Answer, StreamId
from target_service.limits import IDLE_S
from target_service.ordering import seniority
from target_service.sessions import Session
from target_service.step import StepResult
from tests.target.harness import Bench, stamp, toy
from tests.target.history_model import (
    BLOCK_SIZE,
    LIMITS,
    MAX_TOKENS,
    NUM_BLOCKS,
    PLAIN,
    PROMPTS,
    Asked,
    Expected,
    seen,
    spec_of,
    stream_of,
)


class Histories(RuleBasedStateMachine):
    """The bench beside the model; every answer is compared."""

    @initialize()
    def start(self) -> None:
        self.bench = Bench(toy(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, prefix_cache=True), LIMITS)
        self.expected: dict[int, Expected] = {}
        self.num_stale = self.num_closes = self.num_evicted = 0
        self.computed: StepResult | None = None
        self.in_step: list[Expected] = []
        self.num_taken = 0
        for session in (1, 2, 3, 4):
            self.open(session, 1)

    session_ids = st.integers(1, len(PROMPTS))

    @rule(session=session_ids, change=st.sampled_from(["open", "open", "reopen", "open late", "close"]))
    def change_session(self, session: int, change: str) -> None:
        known = self.expected.get(session)
        epoch = known.epoch if known else 1
        if change == "close":
            self.close(session)
        else:
            self.open(session, max(0, epoch + {"open": 0, "reopen": 1, "open late": -1}[change]))

    @rule(session=session_ids)
    def reopen(self, session: int) -> None:
        if session in self.expected:
            self.open(session, self.expected[session].epoch + 1)

    def open(self, session: int, epoch: int) -> None:
        known = self.expected.get(session)
        tokens = known.tokens if known else list(PROMPTS[session])
        tokens = tokens[: len(PROMPTS[session]) + MAX_TOKENS - 1]
        subject, mark = spec_of(session, tokens), stamp(tokens, 0, session, epoch)
        is_new = known is None or epoch > known.epoch
        if is_new:
            seen["reopened"] += known is not None
            self.expected[session] = Expected(session, epoch, tokens)
        outcome = self.act(mark, lambda: self.bench.table.open(stream_of(session), mark, subject, self.bench.now_s))
        if is_new and isinstance(outcome, ItemError):
            assert outcome.code is ErrorCode.NO_CAPACITY
            seen["refused"] += 1
            assert self.bench.table.is_draining or self.bench.table.load().waiting >= LIMITS.max_waiting_sessions
            del self.expected[session]
        elif is_new:
            assert outcome in (None, Opened())
            seen["waited"] += outcome is None
        elif known is not None and (epoch < known.epoch or not known.is_open):
            self.num_stale += 1
            assert outcome is None
        else:
            assert outcome == Opened()

    def close(self, session: int) -> None:
        known = self.expected.pop(session, None)
        self.num_closes += 1
        mark = stamp(PROMPTS[session], 0, session, known.epoch if known else 1)
        outcome = self.act(mark, lambda: self.bench.table.close(stream_of(session), mark))
        assert outcome == Closed() if known is None else outcome in (None, Closed())

    @rule(stream=st.integers(1, 2), is_wanted=st.integers(0, 3))
    def end_stream(self, stream: int, is_wanted: int) -> None:
        if is_wanted == 0:
            self.bench.table.end_stream(StreamId(stream))
            for session in [session for session in self.expected if stream_of(session) == stream]:
                del self.expected[session]
            self.take()

    @rule(is_wanted=st.integers(0, 9))
    def drain(self, is_wanted: int) -> None:
        self.bench.table.is_draining |= is_wanted == 0

    @rule(is_wanted=st.integers(0, 3))
    def a_long_time_passes(self, is_wanted: int) -> None:
        """Whoever has no open or round that waits is gone."""
        if is_wanted:
            return
        self.end_step()
        self.bench.table.expire(self.bench.now_s)
        self.bench.now_s += LIMITS.session_lease_s + 1
        self.bench.table.expire(self.bench.now_s)
        for session, known in list(self.expected.items()):
            if known.is_open and known.pending is None:
                del self.expected[session]
                self.num_evicted += 1
                seen["evicted"] += 1
        self.take()

    @rule(session=session_ids, num_rounds=st.integers(0, 6), num_right=st.integers(0, 4))
    def one_goes_on_while_the_others_are_silent(self, session: int, num_rounds: int, num_right: int) -> None:
        self.a_while_passes()
        for _ in range(num_rounds):
            self.verify(session, num_right=num_right)
            self.steps(2)

    def a_while_passes(self) -> None:
        """Whoever has nothing that waits is dormant."""
        self.end_step()
        self.bench.table.expire(self.bench.now_s)
        self.bench.now_s += IDLE_S
        self.bench.table.expire(self.bench.now_s)
        for session, known in self.expected.items():
            assert self.subject(session).is_dormant == (known.is_open and known.pending is None)

    @rule(session=session_ids, num_right=st.integers(0, 5), num_wrong=st.integers(0, 2), is_decided=st.booleans())
    def next_round(self, session: int, num_right: int, num_wrong: int, is_decided: bool) -> None:
        self.verify(session, num_right=num_right, num_wrong=num_wrong)
        if is_decided:
            self.steps(2)
            self.ask_again(session)

    @rule(num_rounds=st.integers(1, 6), num_right=st.integers(0, 4))
    def everybody_goes_on(self, num_rounds: int, num_right: int) -> None:
        for _ in range(num_rounds):
            for session, known in self.expected.items():
                if known.newest == 0:
                    self.verify(session, num_right=num_right, num_wrong=1)
            self.steps(2)

    @rule(
        session=session_ids,
        round_change=st.sampled_from([1, 1, 2, 0, -1]),
        back=st.sampled_from([0, 0, 1, 3, -1, -2]),
        num_right=st.integers(0, 5),
        is_during_step=st.booleans(),
    )
    def odd_round(self, session: int, round_change: int, back: int, num_right: int, is_during_step: bool) -> None:
        if is_during_step:
            self.verify(session)
            self.begin_step()
        self.verify(session, round_change=round_change, back=back, num_right=num_right)

    @rule(session=session_ids)
    def ask_again(self, session: int) -> None:
        self.end_step()
        self.verify(session, round_change=0, is_same_base=True)
        self.verify(session, round_change=0)

    @rule(session=session_ids, epoch_change=st.sampled_from([-1, 0, 1]), is_corrupt=st.booleans())
    def wrong_round(self, session: int, epoch_change: int, is_corrupt: bool) -> None:
        self.verify(session, epoch_change=epoch_change, is_corrupt=is_corrupt)

    def verify(
        self,
        session: int,
        epoch_change: int = 0,
        round_change: int = 1,
        back: int = 0,
        num_right: int = 0,
        num_wrong: int = 0,
        is_corrupt: bool = False,
        is_same_base: bool = False,
    ) -> None:
        """One verify item, changed in some way from the one that should come next."""
        known = self.expected.get(session)
        subject = known or Expected(session, 1, list(PROMPTS[session]))
        number = max(1, max(subject.last_round, subject.newest) + round_change)
        base = PLAIN[session][: max(1, len(subject.tokens) - back)]
        if is_same_base and subject.last_base:
            base = list(subject.last_base)
        if is_corrupt:
            base[-1] = (base[-1] + 1) % 30
        drafts = [*PLAIN[session][len(base) :][:num_right], *[29] * num_wrong]
        epoch = subject.epoch + epoch_change
        mark = stamp(base, number, session, epoch)
        self.bench.now_s += 0.001
        outcome = self.act(
            mark,
            lambda: self.bench.table.verify(stream_of(session), mark, Proposal(tuple(drafts)), self.bench.now_s),
        )
        if known is None or epoch > known.epoch:
            assert code(outcome) is ErrorCode.UNKNOWN_SESSION
        elif epoch < known.epoch or number <= known.newest or number < known.last_round:
            self.num_stale += 1
            assert outcome is None
        elif number == known.last_round and base != known.last_base:
            seen["repeated for another base"] += 1
            assert code(outcome) is ErrorCode.PREFIX_MISMATCH
        elif number == known.last_round:
            seen["repeated"] += 1
            assert outcome == known.verdict
        elif known.verifying is None and (error := known.base_error(base)) is not None:
            assert code(outcome) is error
        else:
            assert outcome is None
            self.num_stale += known.pending is not None
            known.pending = Asked(number, base, drafts)
            if known.verifying is None:
                known.tokens = base

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.end_step()
            self.begin_step()
        self.end_step()

    @rule()
    def begin_step(self) -> None:
        """Compute a step, and keep its result for later."""
        if self.computed is not None:
            return
        plan = self.bench.table.plan_step(self.bench.now_s)
        self.take()  # who was admitted
        if plan is None:
            return
        assert [item.rank for item in plan.items] == sorted(item.rank for item in plan.items)
        num_calls = len(self.bench.engine.calls)
        self.computed = self.bench.verifier.step(plan)
        new_calls = self.bench.engine.calls[num_calls:]
        assert len(new_calls) <= 1
        assert self.computed.batch_rows == sum(call.num_tokens for call in new_calls) <= LIMITS.max_step_tokens
        self.in_step = []
        for part in self.bench.table._steps._parts:
            known = self.expected[int(part.session.key[1])]
            if part.verifying is not None:
                assert known.pending is not None
                assert known.pending.round == part.verifying.stamp.round
                known.verifying, known.pending = known.pending, None
            self.in_step.append(known)
        self.check_preempted()

    def check_preempted(self) -> None:
        """The newest with rows, and somebody older got them."""
        assert self.computed is not None
        holders = self.bench.table._steps._holders
        ranked = sorted((holders[sequence_id] for sequence_id in holders), key=seniority)
        with_rows = [session for session in ranked if session.num_rows > 0 or session.is_in_flight]
        preempted = [holders[sequence_id] for sequence_id in self.computed.preempted]
        seen["preempted"] += len(preempted)
        seen["displaced"] += len(self.bench.table._steps._displaced)
        assert sorted(preempted, key=seniority) == with_rows[len(with_rows) - len(preempted) :]
        served = [
            part.session
            for part, outcome in zip(self.bench.table._steps._parts, self.computed.outcomes, strict=True)
            if outcome.num_rows > part.session.num_rows or outcome.decided
        ]
        if preempted:
            assert min(map(seniority, served)) < min(map(seniority, preempted))

    @rule()
    def end_step(self) -> None:
        """Commit: verdicts of living sessions, then errors of rounds that came meanwhile with another base."""
        if self.computed is None:
            return
        self.bench.table.commit(self.computed)
        self.computed = None
        given = {
            (int(answer.stamp.session_id), answer.stamp.round): answer.outcome
            for answer in self.take()
            if answer.outcome not in (Opened(), Closed())
        }
        for known in self.in_step:
            if self.expected.get(known.session) is not known:
                continue
            if known.verifying is not None and (known.session, known.verifying.round) in given:
                verdict = given.pop((known.session, known.verifying.round))
                assert isinstance(verdict, Verdict)
                known.decided(verdict)
            else:
                self.num_stale += known.deferred()
            if known.pending is not None:
                error = known.base_error(known.pending.base)
                if error is None:
                    known.tokens = known.pending.base
                else:
                    assert code(given.pop((known.session, known.pending.round))) is error
                    known.pending = None
        assert not given

    def act(self, mark: Stamp, function: Callable[[], None]) -> object:
        """What one item was answered at once, if anything."""
        with self.bench.table.answering(stream_of(int(mark.session_id)), mark):
            function()
        own = [answer.outcome for answer in self.take() if answer.stamp == mark]
        assert len(own) <= 1
        return own[0] if own else None

    def take(self) -> list[Answer]:
        """The new answers; who has waited for its open, and is admitted now, is noted."""
        new, self.num_taken = self.bench.answers[self.num_taken :], len(self.bench.answers)
        for stream, answer in new:
            session = int(answer.stamp.session_id)
            assert stream == stream_of(session)
            if answer.outcome == Opened():
                assert self.expected[session].epoch == answer.stamp.epoch
                self.expected[session].is_open = True
        return [answer for _, answer in new]

    @invariant()
    def tables_agree(self) -> None:
        load = self.bench.table.load()
        assert load.stale_items == self.num_stale
        assert load.evicted_sessions == self.num_evicted
        assert len(self.bench.table) == len(self.expected)
        assert load.running + self.bench.table._admission.num_waiting == len(self.expected)
        assert load.running <= LIMITS.max_sessions
        usage = self.bench.engine.kv_usage()
        assert usage.free_blocks + usage.used_blocks + usage.cached_blocks == usage.total_blocks == NUM_BLOCKS

    @invariant()
    def rows_are_those_of_the_tokens(self) -> None:
        if self.computed is not None:
            return
        for session, expected in self.expected.items():
            subject = self.subject(session)
            assert list(subject.tokens.token_ids) == expected.tokens
            assert subject.num_rows <= len(expected.tokens) - 1
            assert (subject.sequence_id is not None) >= (subject.num_rows > 0)
            if subject.sequence_id is not None:
                held = self.bench.engine.token_ids(subject.sequence_id)
                assert held[: subject.num_rows] == expected.tokens[: subject.num_rows]
        held_by = {session.sequence_id for session in self.bench.table._live.all()} - {None}
        released = {session.sequence_id for session in self.bench.table._live._released}
        assert set(self.bench.engine.sequence_ids) == held_by | released

    def subject(self, session: int) -> Session:
        (subject,) = (known for known in self.bench.table._live.all() if known.key[1] == session)
        return subject

    def settle(self) -> None:
        """Steps until there is nothing to do."""
        self.end_step()
        self.begin_step()
        while self.computed is not None:
            self.end_step()
            self.begin_step()

    def go_silent(self) -> None:
        """Everybody is answered though nobody leaves: whoever has been answered gives way in time."""
        self.settle()
        while any(known.pending or not known.is_open for known in self.expected.values()):
            num_before = len(self.bench.answers)
            self.a_while_passes()
            self.settle()
            assert len(self.bench.answers) > num_before, "stuck"

    def teardown(self) -> None:
        """After a silence whoever has its verdict leaves, until nobody is left: everybody gets one."""
        self.go_silent()
        while self.expected:
            self.settle()
            idle = [session for session, known in self.expected.items() if known.is_open and not known.pending]
            assert idle, "stuck"
            for session in idle:
                self.close(session)
        self.steps(2)
        assert sum(answer.outcome == Closed() for _, answer in self.bench.answers) == self.num_closes
        assert self.bench.table.is_empty
        assert (self.bench.used_blocks(), len(self.bench.engine.sequence_ids)) == (0, 0)


def code(outcome: object) -> ErrorCode:
    assert isinstance(outcome, ItemError), outcome
    return outcome.code
