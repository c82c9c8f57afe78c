"""What the draft tests share: specs, a target with the real policies, a proposer under the test's control."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from draft_service.proposers.base import DraftKvUsage, ProposeInput, ProposerCapabilities, SessionKey
from engine.backends.toy_backend import LogitsOf
from engine.sampling.policies import Decision, VerifyRows, check_proposal, rows_of, verify
from engine.sampling.processors import process
from tandem.types import DraftProbsTransport, ModelInfo, Proposal, SamplingParams, SessionSpec, VerificationPolicy

VOCAB = 32


def make_spec(
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 64,
    policy: VerificationPolicy = VerificationPolicy.GREEDY,
    transport: DraftProbsTransport = DraftProbsTransport.ONE_HOT,
    min_tokens: int = 0,
    eos: Sequence[int] = (),
    **sampling: Any,
) -> SessionSpec:
    """A session's spec; greedy unless a temperature is given."""
    params = {"temperature": 0.0, "seed": 7, **sampling}
    return SessionSpec(
        token_ids=tuple(prompt),
        prompt_len=len(prompt),
        sampling=SamplingParams(**params),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        eos_token_ids=frozenset(eos),
        verification_policy=policy,
        draft_probs_transport=transport,
    )


def coupled_spec(prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> SessionSpec:
    """Sampled at temperature 1 unless said otherwise."""
    return make_spec(
        prompt,
        policy=VerificationPolicy.COUPLED,
        transport=DraftProbsTransport.COUPLED,
        **{"temperature": 1.0, **fields},
    )


def decide(logits_of: LogitsOf, spec: SessionSpec, committed: Sequence[int], proposal: Proposal) -> Decision:
    """The target's decision about one round, by the real processors and policies."""
    request = VerifyRows(spec, tuple(committed), proposal)
    check_proposal(spec, proposal, len(logits_of(committed)))
    drafts = list(proposal.draft_token_ids)
    rows = [torch.from_numpy(logits_of([*committed, *drafts[:index]])) for index in range(len(drafts) + 1)]
    # [K+1, V]
    logits = torch.stack(rows).clone()
    return verify(process(logits, rows_of([request])), [request])[0]


def commit(committed: list[int], proposal: Proposal, decision: Decision) -> None:
    """Append the accepted drafts and the token that follows them."""
    committed += [*proposal.draft_token_ids[: decision.num_accepted], decision.next_token_id]


class StubProposer:
    """Answers by a fixed proposal, an exception or after a gate opens, and records its batches and forgets."""

    def __init__(self, proposal: Proposal = Proposal((1, 2)), vocab_size: int = 0) -> None:  # noqa: B008
        self.proposal = proposal
        self.error: Exception | None = None
        self.batches: list[list[ProposeInput]] = []
        self.forgotten: list[SessionKey] = []
        self.started = threading.Semaphore(0)  # one release a batch
        self.gate = threading.Event()
        self.gate.set()
        self.is_behind: Callable[[ProposeInput], bool] = lambda item: (
            False
        )  # asked for each input, answered None if so
        self._vocab_size = vocab_size

    @property
    def capabilities(self) -> ProposerCapabilities:
        return ProposerCapabilities(
            name="stub",
            graph_safe=False,
            transports=frozenset({DraftProbsTransport.ONE_HOT}),
            model=ModelInfo(vocab_size=self._vocab_size),
        )

    def propose(self, batch: Sequence[ProposeInput]) -> list[Proposal | None]:
        self.batches.append(list(batch))
        self.started.release()
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        return [None if self.is_behind(item) else self.proposal for item in batch]

    def forget(self, session_key: SessionKey) -> None:
        self.forgotten.append(session_key)

    def kv_usage(self) -> DraftKvUsage | None:
        return None
