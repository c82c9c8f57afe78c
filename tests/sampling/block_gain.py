"""How many more drafts `block` lets stand than `rejection`, exactly, over random pairs; writes the report.

Both keep a prefix of i drafts x with a probability that is known in closed form: `rejection` with the product of
min(1, p/q) along it, `block` with the weight w_i of engine/sampling/block.py. Summed over all drafts a drafter may
make, that is the expected number of accepted drafts, for every K at once. A test holds it to the real acceptance
probabilities.

Letters: K drafts, V vocabulary, D most drafts, N pairs.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from tandem import rng
from tandem.rng import F64
from tests.sampling.tables import Prefix, Table

V = 4  # a prefix's logits are one block of noise
NUM_PAIRS = 1000
NUM_DRAFTS = (1, 2, 3, 4, 6, 8)
CLASS_DRAFTS = 4  # the K at which a pair's acceptance class is taken
CLASS_TABLE_DRAFTS = (2, 4, 8)
CLASSES = (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)  # bounds of rejection's accepted / drafted
SHARPNESS = (0.5, 1.0, 2.0)  # scale of the target's logits
UNLIKENESS = (0.3, 0.6, 1.0, 1.5)  # share of noise in the drafter's

REPORT = """# Block verification against rejection sampling

How many tokens does a round yield when `block` decides over all its drafts together, rather than `rejection` over each
by itself? Both are exact; this counts drafts. Made by `make report-block` (tests/sampling/block_gain.py); a test
computes rows of both tables again.

**Method.** {num_pairs} random pairs of a target and a drafter over 4 tokens, whose distributions differ after every
prefix: softmax of s g for the target and of s (g + d g') for the drafter, g and g' Gumbel noise of the project's own
generator (seed = number of the pair), s one of {sharpness} and d one of {unlikeness}, all combinations equally often.
For each pair and each K the expected number of accepted drafts is computed exactly, over all 4^K proposals, so there is
no spread. Tokens a round are 1 + accepted drafts. Such pairs show how the two rules differ, not what a given pair of
models will gain. Drafting costs the same under both; `block` needs q at every draft, and weighs every row even where
`rejection` would have stopped.

**By number of drafts.** Tokens a round (mean over pairs), how much more `block` gives in percent (mean, percentiles and
largest over pairs), and how many pairs let more, or fewer, drafts stand under `block`.

| K | rejection | block | gain, mean | 10 % | 50 % | 90 % | largest | more | fewer |
|---|---|---|---|---|---|---|---|---|---|
{by_drafts}

**By acceptance.** A pair's class is accepted / drafted under `rejection` at K = {class_drafts}; the figures are the
mean gain in percent.

| class | pairs | {class_heads} |
{class_rule}
{by_class}

With one draft the two rules are one. No pair loses. The gain grows with K, since it comes from drafts that are carried
by better ones after them, and there must be some after them. Drafts that nothing random chose (prompt lookup) gain
nothing: their q is one-hot, and then both rules keep a prefix with the same probability.
"""


@dataclass(frozen=True, slots=True)
class RandomPair:
    """A target and a drafter whose logits after each prefix are Gumbel noise, the drafter's partly its own."""

    number: int

    @property
    def sharpness(self) -> float:
        return SHARPNESS[self.number % len(SHARPNESS)]

    @property
    def unlikeness(self) -> float:
        return UNLIKENESS[self.number // len(SHARPNESS) % len(UNLIKENESS)]

    def level(self, length: int) -> tuple[F64, F64]:
        """(p, q) [V^length, V] after every prefix of a length."""
        target, own = self._noise(length, 0), self._noise(length, 1)
        return _softmax(self.sharpness * target), _softmax(self.sharpness * (target + self.unlikeness * own))

    def tables(self) -> tuple[Table, Table]:
        """The same, prefix by prefix."""

        def table(index: int) -> Table:
            def probs(prefix: Prefix) -> F64:
                code = sum(token * V**place for place, token in enumerate(reversed(prefix)))
                return self.level(len(prefix))[index][code]

            return probs

        return table(0), table(1)

    def _noise(self, length: int, word: int) -> F64:
        codes = np.arange(V**length)
        return rng.gumbel_from_bits(rng.philox4x32((codes, length, 0, word), self.number)).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Gains:
    """Expected accepted drafts [N, D] of K = 1 .. D drafts."""

    rejection: F64
    block: F64

    def percent(self, num_drafts: int) -> F64:
        """How many more tokens a round of K drafts yields under `block` [N], in percent."""
        return np.asarray((1 + self.block) / (1 + self.rejection) - 1)[:, num_drafts - 1] * 100


def expected_accepted(pair: RandomPair, most_drafts: int) -> tuple[F64, F64]:
    """Expected accepted drafts [D] of rejection and of block for K = 1 .. D."""
    reach = kept = weight = np.ones(1)  # of each prefix: drafted, product of min(1, p/q), w
    rejection, block = [], []
    for length in range(most_drafts):
        p, q = pair.level(length)
        ratio = p / q
        reach = (reach[:, None] * q).reshape(-1)
        kept = (kept[:, None] * np.minimum(1.0, ratio)).reshape(-1)
        weight = np.minimum(1.0, weight[:, None] * ratio).reshape(-1)
        rejection.append(float(reach @ kept))
        block.append(float(reach @ weight))
    return np.cumsum(rejection), np.cumsum(block)


def measure(num_pairs: int, most_drafts: int) -> Gains:
    """The first pairs, K = 1 .. D."""
    results = [expected_accepted(RandomPair(number), most_drafts) for number in range(num_pairs)]
    return Gains(np.array([rejection for rejection, _ in results]), np.array([block for _, block in results]))


def rows_by_drafts(gains: Gains, num_drafts: Sequence[int]) -> Iterator[str]:
    """One line of the first table for each K."""
    for count in num_drafts:
        rejection, block, gain = gains.rejection[:, count - 1], gains.block[:, count - 1], gains.percent(count)
        low, middle, high = np.percentile(gain, [10, 50, 90])
        more, fewer = int((block > rejection + 1e-9).sum()), int((block < rejection - 1e-9).sum())
        yield (
            f"| {count} | {1 + rejection.mean():.3f} | {1 + block.mean():.3f} | {gain.mean():.2f} | {low:.2f} "
            f"| {middle:.2f} | {high:.2f} | {gain.max():.2f} | {more} | {fewer} |"
        )


def rows_by_class(gains: Gains, num_drafts: Sequence[int]) -> Iterator[str]:
    """One line of the second table for each acceptance class."""
    rate = gains.rejection[:, CLASS_DRAFTS - 1] / CLASS_DRAFTS
    for low, high in pairwise(CLASSES):
        here = (rate >= low) & (rate < high)
        means = " | ".join(f"{gains.percent(count)[here].mean():.2f}" for count in num_drafts)
        yield f"| {low:.1f} to {high:.1f} | {here.sum()} | {means} |"


def report(gains: Gains) -> str:
    """docs/reports/block_policy.md."""
    return REPORT.format(
        num_pairs=len(gains.block),
        sharpness=", ".join(map(str, SHARPNESS)),
        unlikeness=", ".join(map(str, UNLIKENESS)),
        class_drafts=CLASS_DRAFTS,
        by_drafts="\n".join(rows_by_drafts(gains, NUM_DRAFTS)),
        by_class="\n".join(rows_by_class(gains, CLASS_TABLE_DRAFTS)),
        class_heads=" | ".join(f"K = {count}" for count in CLASS_TABLE_DRAFTS),
        class_rule="|---" * (2 + len(CLASS_TABLE_DRAFTS)) + "|",
    )


def _softmax(logits: F64) -> F64:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.parse_args().out.write_text(report(measure(NUM_PAIRS, max(NUM_DRAFTS))))
