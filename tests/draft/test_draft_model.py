"""Proposer `draft_model`: agrees with itself as a target, rolls back absolutely, costs one forward a step."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.proposers.base import ProposeInput, SessionKey
from draft_service.proposers.draft_kv import common_prefix_len
from draft_service.proposers.draft_model import DraftModelProposer
from draft_service.proposers.model_base import Drafting
from engine.backends.base import HiddenCapture, SequenceInput, UnsupportedEngineError
from engine.backends.toy_backend import ToyEngine, hashed_logits, scripted_logits
from tandem.rng import F32
from tandem.types import DraftProbsTransport, LogprobsOptions, Proposal, SessionSpec, VerificationPolicy
from tests.draft.support import VOCAB, commit, coupled_spec, decide, make_spec

LOGITS = hashed_logits(VOCAB)
PROCESSORS: dict[str, Any] = {
    "top_k": 12,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.4,
    "logit_bias": {3: -100.0, 5: 1.5},
    "bad_token_ids": (6,),
}
SPECS = {
    "greedy": make_spec(),
    "greedy with processors": make_spec(min_tokens=9, eos=[4], **PROCESSORS),
    "coupled": coupled_spec(),
    "coupled with processors": coupled_spec(min_tokens=9, eos=[4], **{**PROCESSORS, "temperature": 0.8}),
}


def make_proposer(**engine: int) -> tuple[DraftModelProposer, ToyEngine]:
    toy = ToyEngine(LOGITS, VOCAB, **engine)  # type: ignore[arg-type]
    return DraftModelProposer(toy), toy


def propose_one(
    proposer: DraftModelProposer, spec: SessionSpec, committed: Sequence[int], num_draft_tokens: int, key: int = 1
) -> Proposal:
    item = ProposeInput(SessionKey(key), spec, tuple(committed), num_draft_tokens)
    return proposer.propose([item])[0]


def rows_of_engine(proposer: DraftModelProposer, toy: ToyEngine, key: int = 1) -> list[int]:
    return toy.token_ids(proposer.kv.sequence_id(SessionKey(key)))


@pytest.mark.parametrize("name", SPECS)
def test_the_target_as_its_own_draft_is_accepted_whole_in_every_round(name: str) -> None:
    spec = SPECS[name]
    proposer, _ = make_proposer()
    committed = list(spec.token_ids)
    for round_index in range(12):
        num_wanted = 1 + round_index % 6
        proposal = propose_one(proposer, spec, committed, num_wanted)
        decision = decide(LOGITS, spec, committed, proposal)
        has_ended = proposal.draft_token_ids[-1] in spec.ending_token_ids
        assert len(proposal.draft_token_ids) == num_wanted or has_ended
        assert decision.num_accepted == len(proposal.draft_token_ids)
        if has_ended:
            return
        commit(committed, proposal, decision)


def test_twenty_tokens_of_full_accepts_take_four_rounds_of_four_drafts() -> None:
    spec = make_spec(max_tokens=20)
    proposer, toy = make_proposer()
    committed = list(spec.token_ids)
    num_rounds = 0
    while len(committed) < spec.max_len:
        proposal = propose_one(proposer, spec, committed, 4)
        commit(committed, proposal, decide(LOGITS, spec, committed, proposal))
        num_rounds += 1
    assert num_rounds == 4
    assert len(committed) == spec.max_len
    assert len(toy.calls) == 16  # the catch-up after a full accept costs no forward of its own


@pytest.mark.parametrize("policy", ["greedy", "coupled"])
def test_after_every_forced_acceptance_rows_are_strict_and_drafts_are_those_of_a_fresh_proposer(
    policy: str,
) -> None:
    spec = SPECS[policy]
    proposer, toy = make_proposer()
    committed = list(spec.token_ids)
    for num_accepted in [0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 4, 0, 4]:
        proposal = propose_one(proposer, spec, committed, 4)
        fresh, _ = make_proposer()
        assert proposal == propose_one(fresh, spec, committed, 4)
        drafts = list(proposal.draft_token_ids)
        # the last draft was never fed: its row is what the next round catches up
        assert rows_of_engine(proposer, toy) == committed + drafts[:-1]
        other = (drafts[num_accepted] + 1) % VOCAB if num_accepted < 4 else 0
        committed += [*drafts[:num_accepted], other]
        pending = proposer.kv.roll_back(SessionKey(1), committed)
        assert proposer.kv.num_rows(SessionKey(1)) + len(pending) == len(committed)
        assert rows_of_engine(proposer, toy) + pending == committed
        assert len(pending) == (2 if num_accepted == 4 else 1)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=8), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_whatever_was_drafted_before_the_proposal_is_that_of_a_fresh_proposer(
    histories: list[list[int]], num_wanted: int
) -> None:
    proposer, toy = make_proposer(block_size=4)
    for committed in histories:
        spec = make_spec(committed)
        fresh, _ = make_proposer()
        assert propose_one(proposer, spec, committed, num_wanted) == propose_one(fresh, spec, committed, num_wanted)
    proposer.forget(SessionKey(1))
    assert toy.kv_usage().used_blocks == 0


def test_a_batch_costs_one_forward_per_step_and_only_rows_that_are_wanted() -> None:
    proposer, toy = make_proposer()
    wanted = [1, 4, 2, 4]
    batch = [
        ProposeInput(SessionKey(index), spec, spec.token_ids, num_wanted)
        for index, (num_wanted, spec) in enumerate(
            zip(wanted, (make_spec([index + 1, 2]) for index in range(4)), strict=True)
        )
    ]
    proposals = proposer.propose(batch)
    assert [len(proposal.draft_token_ids) for proposal in proposals] == wanted
    assert [call.num_sequences for call in toy.calls] == [4, 3, 2, 2]
    assert [call.num_rows for call in toy.calls] == [4, 3, 2, 2]
    assert [call.num_tokens for call in toy.calls] == [8, 3, 2, 2]
    for item, proposal in zip(batch, proposals, strict=True):
        alone, _ = make_proposer()
        assert proposal == alone.propose([item])[0]


def test_plain_greedy_sessions_take_the_argmax_path_and_one_that_samples_takes_all_to_logits() -> None:
    proposer, toy = make_proposer()
    for spec in (make_spec(), replace(make_spec(), logprobs=LogprobsOptions(5))):  # those are the target's
        proposer.propose([ProposeInput(SessionKey(1), spec, (1, 2, 3), 2)])
        assert [call.kind for call in toy.calls] == ["argmax", "argmax"]
        toy.calls.clear()
    both = [
        ProposeInput(SessionKey(1), make_spec(), (1, 2, 3), 2),
        ProposeInput(SessionKey(2), coupled_spec(), (1, 2, 3), 2),
    ]
    proposer.propose(both)
    assert [call.kind for call in toy.calls] == ["logits", "logits"]


def test_a_long_prompt_is_caught_up_a_chunk_a_batch_while_the_others_get_their_drafts() -> None:
    toy = ToyEngine(LOGITS, VOCAB)
    proposer = DraftModelProposer(toy, drafting=Drafting(max_step_tokens=8))
    prompts = [[1] * 20, [2] * 3]
    long, short = (
        ProposeInput(SessionKey(index), make_spec(prompt), prompt, 2) for index, prompt in enumerate(prompts)
    )
    alone, _ = make_proposer()
    assert proposer.propose([long, short]) == [None, *alone.propose([short])]
    assert [(call.kind, call.num_tokens) for call in toy.calls] == [("argmax", 5 + 3), ("argmax", 1)]
    toy.calls.clear()
    assert proposer.propose([long]) == [None]
    assert proposer.propose([long]) == alone.propose([long])
    assert [(call.kind, call.num_tokens) for call in toy.calls] == [("advance", 8), ("argmax", 7), ("argmax", 1)]


def test_sessions_that_have_much_to_catch_up_share_the_step() -> None:
    toy = ToyEngine(LOGITS, VOCAB)
    proposer = DraftModelProposer(toy, drafting=Drafting(max_step_tokens=10))
    batch = [ProposeInput(SessionKey(key), make_spec([key] * 12), [key] * 12, 2) for key in (1, 2)]
    num_batches = 1
    while (answers := proposer.propose(batch)) == [None, None]:
        num_batches += 1
    assert num_batches == 3
    assert [call.num_tokens for call in toy.calls] == [10, 10, 4, 2]
    fresh, _ = make_proposer()
    assert answers == fresh.propose(batch)


def test_nothing_is_drafted_after_an_ending_id() -> None:
    toy = ToyEngine(scripted_logits([10, 11, 4, 12, 13], VOCAB, start=3), VOCAB)
    proposer = DraftModelProposer(toy)
    proposal = propose_one(proposer, make_spec(eos=[4]), (1, 2, 3), 5)
    assert proposal.draft_token_ids == (10, 11, 4)
    assert len(toy.calls) == 3
    later = propose_one(proposer, make_spec(eos=[4], min_tokens=3), (1, 2, 3), 5, key=2)
    assert 4 not in later.draft_token_ids
    assert len(later.draft_token_ids) == 5


def test_drafting_stops_where_the_context_or_the_pool_ends() -> None:
    proposer, _ = make_proposer(max_context=8)
    spec = make_spec([1] * 6)
    assert len(propose_one(proposer, spec, [1] * 6, 5).draft_token_ids) == 3
    assert len(propose_one(proposer, spec, [1] * 8, 5).draft_token_ids) == 1
    assert propose_one(proposer, spec, [1] * 9, 5) == Proposal()
    small, _ = make_proposer(num_blocks=2, block_size=4)
    assert len(propose_one(small, spec, [1] * 6, 5).draft_token_ids) == 3


def test_logits_may_be_inference_tensors() -> None:
    class InferenceEngine(ToyEngine):
        def forward_per_position_logits(
            self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None
        ) -> torch.Tensor:
            with torch.inference_mode():
                return super().forward_per_position_logits(inputs, capture).clone()

    spec = SPECS["coupled with processors"]
    proposer = DraftModelProposer(InferenceEngine(LOGITS, VOCAB))
    plain, _ = make_proposer()
    assert propose_one(proposer, spec, spec.token_ids, 3) == propose_one(plain, spec, spec.token_ids, 3)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=["greedy", "top_p"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_a_sessions_drafts_with_a_word_in_the_log_and_nobody_elses(
    sampling: dict[str, float], bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    def logits_of(token_ids: Sequence[int]) -> F32:
        logits = LOGITS(token_ids)
        if token_ids[0] == 9 and len(token_ids) > 3:
            logits[5] = bad
        return logits

    specs = [make_spec([first, 2, 3], **sampling) for first in (9, 1)]
    batch = [ProposeInput(SessionKey(key), spec, spec.token_ids, 3) for key, spec in enumerate(specs)]
    sick, well = DraftModelProposer(ToyEngine(logits_of, VOCAB)).propose(batch)
    healthy, _ = make_proposer()
    expected = healthy.propose(batch)
    assert sick.draft_token_ids == expected[0].draft_token_ids[:1]
    assert well == expected[1]
    assert caplog.messages == ["drafting stops at 4 tokens: the logits are not finite"]


def test_a_backend_that_cannot_truncate_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedEngineError, match="'toy' cannot speculate"):
        DraftModelProposer(ToyEngine(LOGITS, VOCAB, can_truncate=False))


def test_under_rejection_the_returned_q_is_what_was_sampled_from_and_the_output_stays_the_targets() -> None:
    draft_logits, target_logits = np.log(np.array([0.2, 0.3, 0.5])), np.log(np.array([0.5, 0.3, 0.2]))
    proposer = DraftModelProposer(ToyEngine(lambda ids: draft_logits.astype(np.float32), 3))
    num_seeds = 1500
    drafted: Counter[int] = Counter()
    emitted: Counter[int] = Counter()
    num_accepted = 0
    for seed in range(num_seeds):
        spec = make_spec(
            [0],
            policy=VerificationPolicy.REJECTION,
            transport=DraftProbsTransport.SPARSE,
            temperature=1.0,
            seed=seed,
        )
        proposal = propose_one(proposer, spec, [0], 1)
        (draft_probs,) = proposal.draft_probs
        assert draft_probs.token_ids.tolist() == [0, 1, 2]
        assert draft_probs.probs == pytest.approx([0.2, 0.3, 0.5], abs=1e-6)
        drafted.update(proposal.draft_token_ids)
        decision = decide(lambda ids: target_logits.astype(np.float32), spec, [0], proposal)
        committed = [0]
        commit(committed, proposal, decision)
        emitted[committed[1]] += 1
        num_accepted += decision.num_accepted
    share = 1 / num_seeds
    assert [drafted[token] * share for token in range(3)] == pytest.approx([0.2, 0.3, 0.5], abs=0.04)
    assert [emitted[token] * share for token in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=0.04)
    assert num_accepted * share == pytest.approx(0.7, abs=0.04)


@given(st.lists(st.integers(0, 1), max_size=1200), st.integers(0, 1200), st.booleans())
@settings(deadline=None)
def test_common_prefix_len_is_the_first_difference(tokens: list[int], cut: int, differs: bool) -> None:
    other = tokens[:cut] + ([2] if differs else [])
    assert common_prefix_len(tokens, other) == min(cut, len(tokens))
