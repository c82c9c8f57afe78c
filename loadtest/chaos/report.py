"""What a run of chaos has shown, and whether it has passed."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.bench_report import machine_lines, table
from loadtest.chaos.faults import Injector
from loadtest.chaos.streams import Tally


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has shown."""

    tally: Tally
    injector: Injector
    held: Sequence[str]
    exit_codes: Sequence[int]  # of replicas that were asked to end
    elapsed_s: float

    def verdict(self, least_faults: int) -> list[str]:
        """Why the run has not passed; empty when it has."""
        problems = [f"{self.tally.num_problems} answers failed or differed"] if self.tally.num_problems else []
        problems += [f"still in use: {line}" for line in self.held]
        if self.injector.num_faults < least_faults:
            problems.append(f"{self.injector.num_faults} faults are fewer than {least_faults}")
        if not (self.tally.num_greedy and self.tally.num_sampled):
            problems.append("no greedy or no sampled answer was complete")
        if any(self.exit_codes):
            problems.append(f"exit codes of replicas that were asked to end: {sorted(set(self.exit_codes))}")
        return problems


def report(outcome: Outcome, what_ran: str, least_faults: int) -> str:
    """The page."""
    tally, problems = outcome.tally, outcome.verdict(least_faults)
    rows = [[name, str(count)] for name, count in sorted(outcome.injector.counts.items())]
    held = ", ".join(outcome.held) or "nothing"
    return "\n".join(
        [
            "# Chaos",
            "",
            "Real processes behind TCP relays. Faults strike at random, from a seed, a target only while another one",
            "serves; every answer is compared with its undisturbed run, token by token and in its text.",
            "",
            f"{what_ran} The run took {outcome.elapsed_s:.0f} s.",
            *machine_lines(),
            "",
            f"Result: **{'passed' if not problems else 'NOT passed'}**",
            *(f"- {problem}" for problem in [*problems, *tally.problems]),
            "",
            f"- {outcome.injector.num_faults} faults; {tally.num_answers} answers complete ({tally.num_greedy} greedy, "
            f"{tally.num_sampled} sampled), {tally.num_tokens} tokens, {tally.num_problems} failed or different.",
            f"- {tally.num_reopens} sessions opened again, {tally.num_fallback_rounds} rounds without the draft "
            f"service, {tally.num_accepted} of {tally.num_drafts} drafts accepted.",
            f"- The longest answer took {tally.longest_s:.1f} s. Held afterwards: {held}.",
            "",
            *table(["fault", "times"], rows),
            "",
        ]
    )
