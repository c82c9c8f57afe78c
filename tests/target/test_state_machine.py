"""Sessions, epochs, rounds and steps in any order, against a model that knows only plain decoding."""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tandem.serving.items import Closed, Opened
from tandem.types import ErrorCode, ItemError, Verdict
from target_service.step import StepPlan, StepResult
from tests.target.harness import Bench, plain_decode, spec, stamp

PROMPT, MAX_TOKENS = (1, 2, 3), 40
PLAIN = plain_decode(spec(PROMPT, MAX_TOKENS + 20))


@dataclass
class Asked:
    """A round that was asked and not answered."""

    round: int
    base: list[int]
    drafts: list[int]


@dataclass
class Expected:
    """What one session should be."""

    epoch: int
    tokens: list[int] = field(default_factory=lambda: list(PROMPT))
    last_round: int = 0
    verdict: object = None
    pending: Asked | None = None
    verifying: Asked | None = None

    @property
    def newest(self) -> int:
        return max((asked.round for asked in (self.pending, self.verifying) if asked), default=0)

    def base_error(self, base: list[int]) -> ErrorCode | None:
        if self.tokens[: len(base)] != base:
            return ErrorCode.PREFIX_MISMATCH
        is_inside = len(PROMPT) <= len(base) < len(PROMPT) + MAX_TOKENS
        return None if is_inside else ErrorCode.INVALID_ARGUMENT

    def decide(self) -> list[int]:
        """The tokens of the round being verified, by plain decoding alone."""
        assert self.verifying is not None
        base, drafts = self.verifying.base, self.verifying.drafts
        room = len(PROMPT) + MAX_TOKENS - len(base)
        right = PLAIN[len(base) - len(PROMPT) :]
        drafts, num_accepted = drafts[: room - 1], 0
        while num_accepted < len(drafts) and drafts[num_accepted] == right[num_accepted]:
            num_accepted += 1
        return right[: num_accepted + 1]


class Rounds(RuleBasedStateMachine):
    """The bench beside the model; every immediate answer and every verdict is compared."""

    @initialize()
    def start(self) -> None:
        self.bench = Bench()
        self.expected: dict[int, Expected] = {}
        self.num_stale = self.num_closes = 0
        self.computed: StepResult | None = None
        self.plan: StepPlan | None = None
        self.in_step: list[tuple[int, Expected]] = []
        for session in (1, 2):
            self.open(session, 1)

    session_ids = st.integers(1, 2)

    @rule(session=session_ids, change=st.sampled_from(["open", "reopen", "open late", "close"]))
    def change_session(self, session: int, change: str) -> None:
        known = self.expected.get(session)
        epoch = known.epoch if known else 1
        if change == "close":
            self.close(session)
        else:
            self.open(session, max(0, epoch + {"open": 0, "reopen": 1, "open late": -1}[change]))

    def open(self, session: int, epoch: int) -> None:
        known = self.expected.get(session)
        outcome = self.bench.open(spec(PROMPT, MAX_TOKENS), session, epoch)
        if known is not None and epoch < known.epoch:
            self.num_stale += 1
            assert outcome is None
            return
        assert outcome == Opened()
        if known is None or epoch > known.epoch:
            self.expected[session] = Expected(epoch)

    def close(self, session: int) -> None:
        known = self.expected.pop(session, None)
        self.num_closes += 1
        outcome = self.bench.close(stamp(PROMPT, 0, session, known.epoch if known else 1))
        assert outcome == Closed() if known is None else outcome in (None, Closed())

    @rule(session=session_ids, num_right=st.integers(0, 5), num_wrong=st.integers(0, 2), is_decided=st.booleans())
    def next_round(self, session: int, num_right: int, num_wrong: int, is_decided: bool) -> None:
        self.verify(session, num_right=num_right, num_wrong=num_wrong)
        if is_decided:
            self.end_step()
            self.begin_step()
            self.end_step()

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
    ) -> None:
        """One verify item, changed in some way from the one that should come next."""
        known = self.expected.get(session)
        subject = known or Expected(1)
        number = max(1, max(subject.last_round, subject.newest) + round_change)
        base = [*PROMPT, *PLAIN][: max(1, len(subject.tokens) - back)]
        if is_corrupt:
            base[-1] = (base[-1] + 1) % 30
        right = PLAIN[max(0, len(base) - len(PROMPT)) :][:num_right]
        drafts = [*right, *[29] * num_wrong]
        epoch = subject.epoch + epoch_change
        outcome = self.bench.submit(stamp(base, number, session, epoch), drafts)
        if known is None or epoch > known.epoch:
            assert code(outcome) is ErrorCode.UNKNOWN_SESSION
        elif epoch < known.epoch or number <= known.newest or number < known.last_round:
            self.num_stale += 1
            assert outcome is None
        elif number == known.last_round:
            assert outcome == known.verdict
        elif known.verifying is None and (error := known.base_error(base)) is not None:
            assert code(outcome) is error
        else:
            assert outcome is None
            self.num_stale += known.pending is not None
            known.pending = Asked(number, base, drafts)
            if known.verifying is None:
                known.tokens = base

    @rule()
    def begin_step(self) -> None:
        """Compute a step, and keep its result for later."""
        if self.computed is not None:
            return
        self.plan = self.bench.table.plan_step(self.bench.now_s)
        if self.plan is None:
            assert all(expected.pending is None for expected in self.expected.values())
            return
        num_calls = len(self.bench.engine.calls)
        self.computed = self.bench.verifier.step(self.plan)
        assert len(self.bench.engine.calls) == num_calls + bool(self.plan.items)
        self.in_step = [(session, known) for session, known in self.expected.items() if known.pending is not None]
        for _, known in self.in_step:
            known.verifying, known.pending = known.pending, None

    @rule()
    def end_step(self) -> None:
        """Commit: verdicts of living sessions, then errors of rounds that came meanwhile with another base."""
        if self.computed is None:
            return
        before = len(self.bench.answers)
        self.bench.table.commit(self.computed)
        self.computed = None
        answers = [answer for _, answer in self.bench.answers[before:]]
        given = {
            (int(answer.stamp.session_id), answer.stamp.round): answer.outcome
            for answer in answers
            if answer.outcome != Closed()
        }
        for session, known in self.in_step:
            if self.expected.get(session) is not known:
                continue
            assert known.verifying is not None
            verdict = given.pop((session, known.verifying.round))
            assert isinstance(verdict, Verdict)
            assert list(verdict.token_ids) == known.decide()
            known.tokens = [*known.verifying.base, *verdict.token_ids]
            known.last_round, known.verdict, known.verifying = known.verifying.round, verdict, None
            if known.pending is not None:
                error = known.base_error(known.pending.base)
                if error is None:
                    known.tokens = known.pending.base
                else:
                    assert code(given.pop((session, known.pending.round))) is error
                    known.pending = None
        assert not given

    @invariant()
    def tables_agree(self) -> None:
        load = self.bench.table.load()
        assert load.stale_items == self.num_stale
        assert load.running == len(self.bench.table) == len(self.expected)

    @invariant()
    def rows_are_those_of_the_tokens(self) -> None:
        if self.computed is not None:
            return
        for session, expected in self.expected.items():
            (subject,) = (known for known in self.bench.table._live.all() if known.key[1] == session)
            assert list(subject.tokens.token_ids) == expected.tokens
            assert subject.num_rows <= len(expected.tokens) - 1
            if subject.sequence_id is not None:
                held = self.bench.engine.token_ids(subject.sequence_id)
                assert held[: subject.num_rows] == expected.tokens[: subject.num_rows]

    def teardown(self) -> None:
        self.end_step()
        for session in list(self.expected):
            self.close(session)
        self.bench.settle()
        assert sum(answer.outcome == Closed() for _, answer in self.bench.answers) == self.num_closes
        assert self.bench.table.is_empty
        assert (self.bench.used_blocks(), len(self.bench.engine.sequence_ids)) == (0, 0)


def code(outcome: object) -> ErrorCode:
    assert isinstance(outcome, ItemError), outcome
    return outcome.code


TestRounds = Rounds.TestCase
TestRounds.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
