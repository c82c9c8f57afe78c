"""What is wrong with a call, and what a run must have shown."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from loadtest.churn.calls import Call, Ending, Plan, problem_of
from loadtest.memory import MemorySeen

MAX_PROBLEMS = 20  # after so many there is no point in going on
MIN_KV_USAGE = 0.75  # below it the pool is not small


@dataclass(slots=True)
class Tally:
    """Counts over the calls that have ended."""

    endings: Counter[tuple[Plan, Ending]] = field(default_factory=Counter)
    num_finished_greedy: int = 0
    num_finished_sampled: int = 0
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_fallback_rounds: int = 0
    num_reopens: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def num_calls(self) -> int:
        return self.endings.total()

    def num_ended(self, ending: Ending) -> int:
        """Calls that ended so, whatever was planned."""
        return sum(count for (_, how), count in self.endings.items() if how is ending)

    def add(self, call: Call) -> None:
        """Count and judge a call that has ended."""
        assert call.ending is not None
        self.endings[call.fate.plan, call.ending] += 1
        if call.ending is Ending.FINISHED:
            self.num_finished_greedy += call.recorded.is_greedy
            self.num_finished_sampled += not call.recorded.is_greedy
        self.num_tokens += len(call.token_ids)
        self.num_draft_tokens += call.num_draft_tokens
        self.num_accepted += call.num_accepted
        self.num_fallback_rounds += call.num_fallback_rounds
        self.num_reopens += call.num_reopens
        problem = problem_of(call)
        if problem is not None:
            self.problems.append(problem)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A whole run."""

    tally: Tally
    hanging: tuple[str, ...]  # calls that did not end
    most: Mapping[str, float]  # pressure figures, the largest value seen of each
    kv_usage: float  # most of the target's pool in use at once, of 1
    in_use: tuple[str, ...]  # after the end
    elapsed_s: float
    memory: MemorySeen | None = None  # of the target, where it runs the native engine


def verdict(outcome: Outcome) -> list[str]:
    """Why the run does not pass; empty when it does. A run that shows nothing does not pass either."""
    tally = outcome.tally
    shown = {
        "a greedy request finished": tally.num_finished_greedy,
        "a sampled request finished": tally.num_finished_sampled,
        "a request was cancelled": tally.num_ended(Ending.CANCELLED),
        "a request's deadline passed": tally.num_ended(Ending.DEADLINE),
        "a draft was accepted": tally.num_accepted,
        f"the target's pool was {MIN_KV_USAGE:.0%} full": outcome.kv_usage >= MIN_KV_USAGE,
    }
    return [
        *tally.problems,
        *(f"did not end: {call}" for call in outcome.hanging),
        *(f"still in use: {held}" for held in outcome.in_use),
        *(outcome.memory.problems if outcome.memory else ()),
        *(f"nothing is shown: it never happened that {what}" for what, happened in shown.items() if not happened),
    ]
