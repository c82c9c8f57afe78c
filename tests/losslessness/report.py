"""The report of all outcomes in Markdown."""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from engine.bench_report import table
from tests.losslessness.cells import ALPHA, CELLS, FAMILY_ALPHA, NUM_TOKENS, WRONG_CELLS, Cell
from tests.losslessness.results import TESTS, Outcome
from tests.losslessness.statistics import NUM_BINS, ChiSquare, power

METHOD = """\
Is what comes out under speculation distributed as what plain decoding gives? Requests run through the three services,
and every emitted token x becomes a number U = F(x) + v p(x): p is plain decoding's distribution after the tokens before
x (the answer fed to the same model in this process, the same processors applied), F(x) the sum of p over the tokens
ordered before x, v uniform from a generator of its own. If the services are lossless, these numbers are independent and
uniform on (0, 1), whatever the prompts, drafts and parameters (`tests/losslessness/transform.py` says why, early ends
included).

Two orders of tokens: by p, which shows errors in what the target likes, and by p / q, which shows errors in what drafts
are like (q: the draft model's distribution, the adversary's own, or all on the token that prompt lookup would draft).
For each, chi-square over 50 equal bins of the numbers ("tokens", 49 degrees of freedom) and over 7 x 7 bins of adjacent
pairs that do not overlap ("pairs", 48 degrees of freedom)."""

SEEDS = """\
Seeds were fixed beforehand (`tests/losslessness/cells.py`): request n of a cell has the cell's seed plus n, and v is
drawn from the cell's seed. Settings, seeds and raw bin counts: [losslessness.json](losslessness.json). Made by
`make losslessness`; the tests run a shorter form."""

EARLIER = """\
This is the second run of all cells. [The first](losslessness_run1.md) was not what was asked for: one of its 160 tests,
`toy:rejection:draft_model:sparse:processors`, tokens by p / q, gave p = 1.4e-5, which 160 tests of a lossless system
give once in 450 runs. Ten repeats of that cell with other seeds passed, alone and added up, but they had been decided
on after the figure was seen. So everything was run once more: its seeds were committed before it began, the tests are
the same (`eagle` and `mtp` came with this run), and nothing of the first run counts here. A fault as large as that
figure (chi-square 53 above its expectation, with 100,000 tokens) would fail here again with probability 74%, and stand
out in the repeats added up with certainty."""

REAL = """\
SmolLM2-135M-Instruct in float32, in three processes, 16 requests at a time, prompts of Spec-Bench in the model's chat
template, temperature 1, answers to EOS or 256 tokens, at most 2 drafts a round by prompt lookup and 3 by the draft
model. The draft model is the target without two of its 30 layers, in bfloat16."""

TOY = """\
V = 64, logits from two random tables; the three services in one process over loopback, 64 requests at a time, at most 3
drafts a round. Adversaries run inside the real draft service: `reversed` draws from the target's probabilities in
reversed ranking, `constant` always drafts one token, `eos` always the end, `random` any token, `often EOS` the end half
of the time while min_tokens forbids it. The heads of `eagle` and `mtp` are untrained: their drafts are hardly ever
right. `processors` mixes top_p, top_k, min_p, penalties, logit_bias, temperatures and min_tokens."""

WRONG = """\
The same harness with the named fault put into the real rule (`tests/losslessness/wrong_rules.py`): each must be
found."""


def render(outcomes: Mapping[str, Outcome]) -> tuple[str, bool]:
    """The report, and whether everything is there and as it should be."""
    problems = _problems(outcomes)
    verdict = "**not shown**" if problems else "**lossless**: no cell fails a test, and every wrong rule is found"
    sections = [
        "# Losslessness",
        METHOD,
        _threshold(),
        SEEDS,
        EARLIER,
        "\n".join(_made(outcomes)),
        "\n".join([f"Verdict: {verdict}.", *(f"- {problem}" for problem in problems)]),
        _spread(outcomes),
        "## The real model",
        REAL,
        _table([cell for cell in CELLS if cell.model == "real"], outcomes),
        "## The toy model, every combination",
        TOY,
        _table([cell for cell in CELLS if cell.model == "toy"], outcomes),
        *_looked_at_again(outcomes),
        "## Wrong rules",
        WRONG,
        _table(WRONG_CELLS, outcomes),
    ]
    return "\n\n".join(section for section in sections if section) + "\n", not problems


def _problems(outcomes: Mapping[str, Outcome]) -> list[str]:
    problems = []
    for cell in (*CELLS, *WRONG_CELLS):
        outcome = outcomes.get(cell.name)
        if outcome is None:
            problems.append(f"`{cell.name}` has not been run")
        elif outcome.num_tokens < NUM_TOKENS:
            problems.append(f"`{cell.name}` has {outcome.num_tokens} tokens only")
        elif cell.rule is None and outcome.smallest_p <= ALPHA:
            problems.append(f"`{cell.name}` fails: p = {outcome.smallest_p:.2g}")
        elif cell.rule is not None and outcome.smallest_p > ALPHA:
            problems.append(f"`{cell.name}` is not found: p = {outcome.smallest_p:.2g}")
    return problems


def _looked_at_again(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The repeats of cells that are below their bound. They explain a failure; they do not undo it."""
    repeated = [cell for cell in CELLS if any(repeat.name in outcomes for repeat in cell.repeats)]
    if not repeated:
        return []
    repeats = [repeat for cell in repeated for repeat in cell.repeats]
    made = [outcomes[repeat.name] for repeat in repeats if repeat.name in outcomes]
    values = [test.p_value for outcome in made for test in outcome.tests.values()]
    names = ", ".join(f"`{cell.name}`" for cell in repeated)
    text = (
        f"Decided on after the first figures had been seen, so the verdict does not count them: {names}\n"
        f"with other seeds, {len(made)} of {len(repeats)} repeats made. Of their {len(values)} p-values the smallest\n"
        f"is {min(values):.2g}; Bonferroni over these alone asks for {FAMILY_ALPHA / len(values):.2g}.\n\n"
        f"All repeats of a cell added up, bin by bin:\n{_pooled(repeated, outcomes)}"
    )
    return ["## Looked at again", text, _table(repeats, outcomes)]


def _pooled(repeated: Sequence[Cell], outcomes: Mapping[str, Outcome]) -> str:
    """The tests over all repeats of a cell together: a fault of the first figure's size would stand out the more."""
    lines = []
    for cell in repeated:
        made = [outcomes[repeat.name] for repeat in cell.repeats if repeat.name in outcomes]
        tests = {
            name: ChiSquare(
                tuple(sum(bins) for bins in zip(*(outcome.counts[name] for outcome in made), strict=True))
            )
            for name in TESTS
        }
        figures = ", ".join(f"{name} {test.statistic:.1f} ({test.p_value:.2g})" for name, test in tests.items())
        num_tokens = sum(outcome.num_tokens for outcome in made)
        lines.append(f"- `{cell.name}`, {num_tokens:,} tokens: {figures}")
    return "\n".join(lines)


def _threshold() -> str:
    """When a test fails, and what it can see: by the non-central chi-square distribution."""
    shares = []
    for total_variation in (0.01, 0.02):
        halves = np.where(np.arange(NUM_BINS) < NUM_BINS // 2, 1, -1)
        chances = 1 / NUM_BINS + halves * 2 * total_variation / NUM_BINS
        shares.append(f"{power(chances.tolist(), NUM_TOKENS, ALPHA):.0%} at {total_variation}")
    return (
        f"A test fails below p = {ALPHA:.2g}: {FAMILY_ALPHA} over {len(TESTS)} tests of {len(CELLS)} cells "
        f"(Bonferroni). Every cell has\n{NUM_TOKENS:,} tokens, the first of its answers in order. A total variation "
        f"that is spread over all 50 bins, the hardest\nto see, is found with probability {', '.join(shares)}."
    )


def _made(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Where and when, by environment."""
    lines = []
    for environment in sorted({outcome.environment for outcome in outcomes.values()}):
        made = [outcome for outcome in outcomes.values() if outcome.environment == environment]
        dates = sorted({outcome.date for outcome in made})
        span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        minutes = sum(outcome.seconds for outcome in made) / 60
        lines.append(f"Run on {span}, {len(made)} cells, {minutes:.0f} minutes of cells: {environment}.")
    return lines


def _spread(outcomes: Mapping[str, Outcome]) -> str:
    """How the p-values of all lossless cells lie as a whole."""
    kept = [outcomes[cell.name] for cell in CELLS if cell.name in outcomes]
    values = [test.p_value for outcome in kept for test in outcome.tests.values()]
    if not values:
        return ""
    num_below = sum(value < FAMILY_ALPHA for value in values)
    return (
        f"Of {len(values)} p-values the smallest is {min(values):.2g}; {num_below} are below {FAMILY_ALPHA}, where "
        f"{len(values) * FAMILY_ALPHA:.0f} are expected.\nKolmogorov-Smirnov of all against the uniform distribution: "
        f"p = {stats.kstest(values, 'uniform').pvalue:.2g} (for scale: the two orders share their tokens)."
    )


def _table(cells: Sequence[Cell], outcomes: Mapping[str, Outcome]) -> str:
    header = ["policy", "drafts", "q travels", "requests", "tokens", "rounds", "acceptance"]
    header += [f"{test}: χ² (p)" for test in TESTS]
    rows = [_row(cell, outcomes[cell.name]) for cell in cells if cell.name in outcomes]
    return "\n".join(table(header, rows))


def _row(cell: Cell, outcome: Outcome) -> list[str]:
    policy = f"{cell.policy}: {cell.rule}" if cell.rule else cell.policy.value
    figures = [f"{outcome.num_tokens:,}", f"{outcome.num_rounds:,}", f"{outcome.acceptance_rate:.1%}"]
    tests = [f"{test.statistic:.1f} ({test.p_value:.2g})" for test in outcome.tests.values()]
    return [policy, cell.drafts, cell.transport.value, cell.mix, *figures, *tests]
