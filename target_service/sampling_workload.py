"""The verifications that `target_service/bench_sampling.py` times: policies, filters, and requests whose drafts stand.

Letters: K drafts of a request, T rows of the batch, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.backends.base import SequenceId, SequenceInput
from engine.backends.torch_backend import TorchEngine
from engine.sampling.likeliest import likeliest
from engine.sampling.policies import VerifyRows
from engine.sampling.processors import process
from engine.sampling.rejection import probabilities
from engine.sampling.rows import Row
from engine.sampling.sampler import sample_row, select
from tandem.types import (
    MAX_SPARSE_ENTRIES,
    DraftProbs,
    DraftProbsTransport,
    Proposal,
    SamplingParams,
    SessionSpec,
    VerificationPolicy,
)

NUM_DRAFTS = 4
FILTERS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "temperature 0.7": {"temperature": 0.7},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2},
}
GREEDY_FILTERS = ("none", "penalties")  # the others do not change an argmax


@dataclass(frozen=True, slots=True)
class Case:
    """One policy with one kind of filter."""

    policy: VerificationPolicy
    filters: str

    def spec(self, committed_token_ids: Sequence[int], seed: int) -> SessionSpec:
        """A session of the case; half of its committed tokens are output."""
        temperature = 0.0 if self.policy is VerificationPolicy.GREEDY else 1.0
        return SessionSpec(
            token_ids=tuple(committed_token_ids),
            prompt_len=len(committed_token_ids) // 2,
            sampling=SamplingParams(**{"temperature": temperature, "seed": seed, **FILTERS[self.filters]}),
            max_tokens=len(committed_token_ids) + NUM_DRAFTS + 1,
            verification_policy=self.policy,
            draft_probs_transport=DraftProbsTransport.SPARSE,
        )


def all_cases() -> list[Case]:
    """Every policy with every filter that has a meaning for it."""
    return [
        Case(policy, filters)
        for policy in VerificationPolicy
        for filters in (GREEDY_FILTERS if policy is VerificationPolicy.GREEDY else FILTERS)
    ]


def accepted_requests(case: Case, logits: torch.Tensor, contexts: Sequence[Sequence[int]]) -> list[VerifyRows]:
    """A request a context, whose K drafts all stand at their raw rows of float32 [T, V]."""
    rows = logits.view(len(contexts), NUM_DRAFTS + 1, -1)
    return [_accepted_request(case.spec(c, seed), c, rows[seed]) for seed, c in enumerate(contexts)]


def _accepted_request(spec: SessionSpec, committed: Sequence[int], logits: torch.Tensor) -> VerifyRows:
    """One request and its rows [K+1, V]."""
    drafts: tuple[int, ...] = ()
    draft_probs: list[DraftProbs] = []
    for index in range(NUM_DRAFTS):
        row = Row(spec, committed, drafts)
        processed = process(logits[index : index + 1].clone(), [row])[0]
        if spec.effective_policy.is_ratio_test:
            draft_probs.append(_modest_q(processed))
            drafts += (int(select(processed)),)
        else:
            drafts += (sample_row(processed, row),)
    return VerifyRows(spec, committed, Proposal(drafts, tuple(draft_probs)))


def _modest_q(processed: torch.Tensor) -> DraftProbs:
    """A q over the likeliest tokens that gives the first of them half of what p does, so that as a draft it stands."""
    token_ids = likeliest(processed, MAX_SPARSE_ENTRIES).numpy()
    first = float(probabilities(processed)[token_ids[0]]) if token_ids.size > 1 else 2.0
    probs = np.full(token_ids.size, (1.0 - first / 2) / max(token_ids.size - 1, 1))
    probs[0] = first / 2
    return DraftProbs(token_ids.astype(np.uint32), probs.astype(np.float32))


def sampled_contexts(
    engine: TorchEngine, batch_size: int, context_len: int
) -> tuple[list[SequenceInput], list[list[int]]]:
    """Sequences of text that the model itself sampled: the inputs of one verification, and the committed tokens."""
    vocab_size = engine.capabilities.vocab_size
    contexts = [[(7919 * (index + 1)) % vocab_size] for index in range(batch_size)]
    sequences: list[SequenceId] = [engine.create() for _ in range(batch_size)]
    case = Case(VerificationPolicy.COUPLED, "none")
    specs = [case.spec(context, seed) for seed, context in enumerate(contexts)]
    for _ in range(context_len + NUM_DRAFTS - 1):
        inputs = [SequenceInput(s, c[-1:], 1) for s, c in zip(sequences, contexts, strict=True)]
        logits = engine.forward_per_position_logits(inputs)
        for row, spec, context in zip(logits, specs, contexts, strict=True):
            context.append(sample_row(row, Row(spec, context)))
    for sequence in sequences:
        engine.truncate(sequence, context_len - 1)
    inputs = [
        SequenceInput(s, c[context_len - 1 :], NUM_DRAFTS + 1) for s, c in zip(sequences, contexts, strict=True)
    ]
    return inputs, [context[:context_len] for context in contexts]
