"""What the sampling tests share: specs, logits of a distribution, and the five-standard-errors check."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.rows import Row
from engine.sampling.sampler import sample_row
from tandem.types import DraftProbs, DraftProbsTransport, SamplingParams, SessionSpec, VerificationPolicy

Probs = npt.NDArray[np.float64]
PROMPT = (1, 2, 3)
P4 = np.array([0.5, 0.3, 0.15, 0.05])


def make_spec(
    policy: VerificationPolicy = VerificationPolicy.COUPLED,
    transport: DraftProbsTransport = DraftProbsTransport.SPARSE,
    *,
    prompt: tuple[int, ...] = PROMPT,
    min_tokens: int = 0,
    eos: frozenset[int] = frozenset(),
    sample_index: int = 0,
    **sampling: Any,
) -> SessionSpec:
    """A session whose sampling fields are the keywords; seed 7 unless given."""
    return SessionSpec(
        token_ids=prompt,
        prompt_len=len(prompt),
        sampling=SamplingParams(**{"seed": 7, **sampling}),
        max_tokens=1_000_000,
        min_tokens=min_tokens,
        eos_token_ids=eos,
        verification_policy=policy,
        draft_probs_transport=transport,
        sample_index=sample_index,
    )


def logits_of(probs: npt.ArrayLike) -> torch.Tensor:
    """float32 logits whose softmax is `probs`."""
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(np.asarray(probs, dtype=np.float64)).astype(np.float32))


def sparse(probs: npt.ArrayLike) -> DraftProbs:
    """The wire form of a small q, zeros left out."""
    dense = np.asarray(probs, dtype=np.float32)
    token_ids = np.flatnonzero(dense)
    return DraftProbs(token_ids.astype(np.uint32), dense[token_ids])


def full(probs: npt.ArrayLike) -> DraftProbs:
    """The wire form of a q with all its tokens."""
    return DraftProbs(None, np.asarray(probs, dtype=np.float32))


def worst_deviation(counts: npt.ArrayLike, probs: npt.ArrayLike) -> float:
    """A count's largest distance from its expectation, in standard errors; infinite for an impossible token."""
    observed, expected = np.asarray(counts, dtype=np.float64).ravel(), np.asarray(probs, dtype=np.float64).ravel()
    total = observed.sum()
    if observed[expected == 0].any():
        return float("inf")
    possible = expected > 0
    variance = total * expected[possible] * (1 - expected[possible])
    distance = np.abs(observed[possible] - total * expected[possible])
    return float((distance / np.sqrt(np.maximum(variance, 1.0))).max())


def sample(processed: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Plain decoding's token for each processed row of float32 [R, V]."""
    return [sample_row(processed[index], row) for index, row in enumerate(rows)]
