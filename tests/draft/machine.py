"""Random histories of a draft service under pressure."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from draft_service.limits import IDLE_S
from tests.draft.bench import SPECS
from tests.draft.checked_service import LEASE_S, MAX_DRAFTS, MAX_SESSIONS, PROMPTS, CheckedService, Pressure

PLACES = st.tuples(st.integers(0, 1), st.integers(1, 3))


class DraftHistories(RuleBasedStateMachine):
    """What happens to a service; `CheckedService` says whether it did right."""

    pressure: Pressure  # set by a subclass

    @initialize()
    def start(self) -> None:
        self.checked = CheckedService(self.pressure)

    @rule(
        place=PLACES,
        change=st.sampled_from([1, 1, 1, 0, -1]),
        prompt=st.sampled_from(PROMPTS),
        kind=st.sampled_from(sorted(SPECS)),
        is_corrupt=st.sampled_from([False] * 5 + [True]),
    )
    def open_or_repeat(
        self, place: tuple[int, int], change: int, prompt: tuple[int, ...], kind: str, is_corrupt: bool
    ) -> None:
        self.checked.open(place, change, prompt, kind, is_corrupt)

    @rule(
        picked=st.lists(st.integers(0, MAX_SESSIONS - 1), min_size=1, max_size=4),
        num_accepted=st.integers(0, MAX_DRAFTS),
        other=st.integers(0, 9),
        k=st.integers(1, 7),
        tail=st.integers(0, 40),
        back=st.sampled_from([0, 0, 0, 0, 2, 30]),
        is_settled=st.booleans(),
        seconds=st.sampled_from([0.0, 0.0, 1.0, IDLE_S]),
    )
    def next_rounds(
        self,
        picked: list[int],
        num_accepted: int,
        other: int,
        k: int,
        tail: int,
        back: int,
        is_settled: bool,
        seconds: float,
    ) -> None:
        """Rounds of several sessions, at once or one after the other."""
        for pick in picked:
            if self.checked.known:
                place = sorted(self.checked.known)[pick % len(self.checked.known)]
                self.checked.propose(place, num_accepted, other, k, tail, back, "")
        if is_settled:
            self.checked.settle()
        self.checked.pass_time(seconds, is_settled=False)

    @rule(
        place=PLACES,
        num_accepted=st.integers(0, MAX_DRAFTS),
        k=st.integers(0, 7),
        tail=st.integers(0, 40),
        odd=st.sampled_from(
            [
                "",
                "retry",
                "corrupt repeat",
                "repeat elsewhere",
                "late round",
                "late epoch",
                "next epoch",
                "corrupt",
                "past",
            ]
        ),
    )
    def odd_round(self, place: tuple[int, int], num_accepted: int, k: int, tail: int, odd: str) -> None:
        self.checked.propose(place, num_accepted, 0, k, tail, 0, odd)

    @rule(place=PLACES, is_late=st.sampled_from([False, False, False, True]))
    def close(self, place: tuple[int, int], is_late: bool) -> None:
        self.checked.close(place, is_late)

    @rule(index=st.integers(0, 1))
    def end_stream(self, index: int) -> None:
        self.checked.end_stream(index)

    @rule(seconds=st.sampled_from([1.0, IDLE_S, IDLE_S, LEASE_S - IDLE_S, LEASE_S]), is_settled=st.booleans())
    def pass_time(self, seconds: float, is_settled: bool) -> None:
        self.checked.pass_time(seconds, is_settled)

    @rule()
    def go_on(self) -> None:
        self.checked.go_on()

    @rule()
    def settle(self) -> None:
        self.checked.settle()

    @invariant()
    def memory_is_as_it_must_be(self) -> None:
        self.checked.bench.check_rows()
        self.checked.bench.check_accounting()
        self.checked.sessions_are_as_expected()

    def teardown(self) -> None:
        if hasattr(self, "checked"):
            try:
                self.checked.drain()
            finally:
                self.checked.bench.close()
