"""A run in words: the summary on the screen, and the committed report around it."""

from engine.bench_report import machine_lines, table
from loadtest.churn.calls import Ending, Plan
from loadtest.churn.judge import Outcome, Tally, verdict
from loadtest.memory import PROCESS_BYTES, MemorySeen

METHOD = """\
Made by `make churn` (`loadtest/churn/`). A pool of distinct requests is run first: one at a time, speculation off. Then
every client makes one call after the other, each a request of the pool with a fate, both drawn at random: to finish; to
be cancelled after 1 to 12 chunks; to be left after 0.02 to 20 s, whatever has come; or to have a deadline of 0.02 to
20 s (times uniform in their logarithm). Prompts have a few words to 2,400 characters, answers at most 1 to 64 tokens,
every third 64 to 256. Half of the requests are greedy, half sampled under `coupled`, each with a seed of its own; some
have penalties, stop strings, min_tokens, a priority, another number of drafts.

A call that finished must have given the solo run's text and token ids. One that was cancelled or met its deadline must
have given a beginning of both. Any other end is a failure, and so is a call that hangs. When all calls have ended, no
session may be open and no block in use, at target and draft. A run in which nothing finished (greedy and sampled), was
cancelled, met a deadline or was drafted right, or whose pool never got nearly full, does not pass either."""

MEMORY = """\
Resident memory of the target process, in MiB (`loadtest/memory.py`). Under the load and after it, it must be within
15 % of the sum, or the run does not pass; `tests/e2e/test_memory.py` holds that for a full pool. The pool is resident
from the start, since it is filled with zeros. Weights are counted as the engine holds them: packed for its linears, and
the embedding a second time for look-ups, where head and embedding are one tensor in the file. While loading, the file's
weights are there as well, hence the peak."""
_MIB = 1 << 20


def report(outcome: Outcome, settings: str) -> str:
    """The committed page; `settings` says what ran."""
    lines = ["# Churn", "", METHOD, "", settings, "", *machine_lines(), "", *summary(outcome), ""]
    if outcome.memory is not None:
        lines += ["## Memory", "", MEMORY, "", *_memory(outcome.memory), ""]
    return "\n".join(lines)


def _memory(seen: MemorySeen) -> list[str]:
    plan = seen.plan
    parts = {
        "weights": plan.weights,
        f"pool, {plan.kv_per_token} bytes a token": plan.pool,
        "the process: interpreter, libraries, tokenizer, buffers of a step (a constant)": PROCESS_BYTES,
        "sum": plan.total,
    }
    resident = {
        "resident before the load": seen.before,
        "most under the load, looking five times a second": seen.most,
        "resident after the load": seen.after,
        "peak, while loading": seen.peak,
    }
    rows = [[name, f"{size / _MIB:.0f}", ""] for name, size in parts.items()]
    rows += [[name, f"{size / _MIB:.0f}", f"{size / plan.total - 1:+.1%}"] for name, size in resident.items()]
    return table(["what", "MiB", "against the sum"], rows)


def summary(outcome: Outcome) -> list[str]:
    """Markdown: the verdict, counts by plan and ending, figures."""
    tally = outcome.tally
    problems = verdict(outcome)
    return [
        f"Verdict: **{'not passed' if problems else 'passed'}**.",
        *(f"- {problem}" for problem in problems),
        "",
        *_endings(tally),
        "",
        f"{tally.num_calls} calls in {outcome.elapsed_s:.0f} s, of them {tally.num_finished_greedy} greedy and "
        f"{tally.num_finished_sampled} sampled ones finished; {tally.num_tokens} tokens came, "
        f"{tally.num_accepted} of {tally.num_draft_tokens} drafts were accepted. "
        f"In finished calls: {tally.num_fallback_rounds} fallback rounds, {tally.num_reopens} re-opened sessions.",
        "",
        f"Most of the target's pool in use: {outcome.kv_usage:.0%}. Most seen, looking five times a second:",
        "",
        *(f"- {name}: {most:.0f}" for name, most in outcome.most.items()),
        "",
        f"In use afterwards: {'; '.join(outcome.in_use) or 'nothing'}.",
    ]


def _endings(tally: Tally) -> list[str]:
    """A table of plans by endings."""
    rows = [[plan.value, *(str(tally.endings[plan, ending]) for ending in Ending)] for plan in Plan]
    return table(["plan", *(ending.value for ending in Ending)], rows)
