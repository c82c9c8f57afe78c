"""Drafts: the same processing, the right noise, and q exactly as it was sampled from."""

import numpy as np
import pytest
import torch

from engine.sampling.draft_sampler import sample_drafts
from engine.sampling.policies import Decision, VerifyRows, check_proposal, rows_of, verify
from engine.sampling.processors import process
from engine.sampling.rejection import sent_q
from engine.sampling.rows import Row
from engine.sampling.sampler import select
from tandem import rng
from tandem.rng import Stream
from tandem.types import MAX_SPARSE_ENTRIES, DraftProbsTransport, Proposal, VerificationPolicy
from tests.sampling.helpers import PROMPT, logits_of, make_spec, sample, worst_deviation

COUPLED, REJECTION, BLOCK = VerificationPolicy.COUPLED, VerificationPolicy.REJECTION, VerificationPolicy.BLOCK
SPARSE, FULL, ONE_HOT = DraftProbsTransport.SPARSE, DraftProbsTransport.FULL, DraftProbsTransport.ONE_HOT
LOGITS = torch.randn((4, 1000), generator=torch.Generator().manual_seed(4)) * 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_greedy_and_coupled_drafts_are_what_the_target_would_choose(temperature: float) -> None:
    for top_p in (0.8, 1.0):
        rows = [Row(make_spec(temperature=temperature, top_p=top_p), PROMPT, (4,) * i) for i in range(4)]
        drafts, probs = sample_drafts(LOGITS.clone(), rows)
        assert drafts == sample(process(LOGITS.clone(), rows), rows)
        assert probs == [None] * 4


@pytest.mark.parametrize(
    ("policy", "transport"),
    [(COUPLED, ONE_HOT), (REJECTION, SPARSE), (BLOCK, SPARSE), (REJECTION, FULL), (BLOCK, FULL)],
)
def test_a_drafter_with_the_targets_own_logits_is_always_accepted(
    policy: VerificationPolicy, transport: DraftProbsTransport
) -> None:
    for seed in range(20):
        spec = make_spec(policy, transport, seed=seed, top_k=100)  # within what `sparse` can send
        drafts: list[int] = []
        sent = []
        for index in range(3):
            rows = [Row(spec, PROMPT, tuple(drafts))]
            (draft,), (draft_probs,) = sample_drafts(LOGITS[index : index + 1].clone(), rows)
            drafts.append(draft)
            sent += [draft_probs] if draft_probs else []
        request = VerifyRows(spec, PROMPT, Proposal(tuple(drafts), tuple(sent)))
        check_proposal(spec, request.proposal, 1000)
        assert verify(process(LOGITS.clone(), rows_of([request])), [request])[0].num_accepted == 3


def test_a_whole_q_is_the_processed_rows_own_and_a_draft_is_drawn_from_it() -> None:
    spec = make_spec(BLOCK, FULL, temperature=0.9, top_k=300)
    row = Row(spec, PROMPT)
    (draft,), (draft_probs,) = sample_drafts(LOGITS[:1].clone(), [row])
    assert draft_probs is not None
    assert draft_probs.token_ids is None
    processed = process(LOGITS[:1].clone(), [row])[0]
    assert np.array_equal(draft_probs.probs, torch.softmax(processed.double(), 0).float().numpy())
    assert np.count_nonzero(draft_probs.probs) == 300
    noise = rng.gumbel(7, rng.stream_word(Stream.DRAFT, 3, 3), 3, 1000)
    with np.errstate(divide="ignore"):
        assert draft == np.argmax(np.log(draft_probs.probs.astype(np.float64)) + noise)


def test_a_one_hot_rejection_draft_is_the_likeliest_token() -> None:
    rows = [Row(make_spec(REJECTION, ONE_HOT, top_p=0.9, seed=seed), PROMPT) for seed in range(4)]
    drafts, probs = sample_drafts(LOGITS.clone(), rows)
    assert drafts == select(LOGITS).tolist()
    assert probs == [None] * 4


def test_a_sent_q_is_the_renormalised_top_and_a_valid_proposal() -> None:
    spec = make_spec(REJECTION, SPARSE, temperature=0.9)
    (draft,), (draft_probs,) = sample_drafts(LOGITS[:1].clone(), [Row(spec, PROMPT)])
    assert draft_probs is not None
    assert draft_probs.token_ids.size == MAX_SPARSE_ENTRIES
    assert np.array_equal(draft_probs.token_ids, np.sort(LOGITS[0].topk(MAX_SPARSE_ENTRIES).indices.numpy()))
    expected = torch.softmax(LOGITS[0, draft_probs.token_ids.astype(np.int64)].double() / 0.9, 0).numpy()
    assert draft_probs.probs == pytest.approx(expected, rel=1e-5)
    assert draft in draft_probs.token_ids
    check_proposal(spec, Proposal((draft,), (draft_probs,)), 1000)


def test_masked_tokens_are_not_in_q() -> None:
    spec = make_spec(REJECTION, SPARSE, top_k=3)
    _, (draft_probs,) = sample_drafts(LOGITS[:1].clone(), [Row(spec, PROMPT)])
    assert draft_probs is not None
    assert draft_probs.token_ids.size == 3


def test_a_sparse_draft_is_the_gumbel_argmax_of_the_numbers_that_travel() -> None:
    for position in range(3, 60):
        spec = make_spec(REJECTION, SPARSE, seed=position)
        row = Row(spec, range(position), (1, 2))
        (draft,), (draft_probs,) = sample_drafts(LOGITS[:1].clone(), [row])
        assert draft_probs is not None
        word = rng.stream_word(Stream.DRAFT, position + 2, position)
        noise = rng.gumbel(position, word, position + 2, 1000)[draft_probs.token_ids]
        scores = np.log(draft_probs.probs.astype(np.float64)) + noise
        assert draft == draft_probs.token_ids[np.argmax(scores)]


def test_drafts_are_distributed_as_the_q_they_are_sent_with() -> None:
    q = np.array([0.5, 0.3, 0.15, 0.05])
    rows = [Row(make_spec(REJECTION, SPARSE, seed=seed), PROMPT) for seed in range(2000)]
    drafts, probs = sample_drafts(logits_of(q).repeat(2000, 1), rows)
    assert worst_deviation(np.bincount(drafts, minlength=4), q) < 5
    assert probs[0] is not None
    assert sent_q(probs[0])[1] == pytest.approx(q, abs=1e-6)


def test_a_later_round_draws_fresh_drafts_at_the_same_position() -> None:
    spec = make_spec(REJECTION, SPARSE)
    flat = torch.zeros((1, 1000))
    drawn = {sample_drafts(flat.clone(), [Row(spec, range(base), (0,) * (9 - base))])[0][0] for base in (5, 7, 9)}
    assert len(drawn) == 3


def test_the_tie_rule_holds_at_the_drafter() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    greedy = make_spec(VerificationPolicy.GREEDY, temperature=0.0)
    assert sample_drafts(logits.clone(), [Row(greedy, PROMPT)])[0] == [1]
    assert sample_drafts(logits.clone(), [Row(make_spec(REJECTION, ONE_HOT), PROMPT)])[0] == [1]
    request = VerifyRows(greedy, PROMPT, Proposal((1,)))
    assert verify(logits.repeat(2, 1), [request]) == [Decision(1, 1)]


@pytest.mark.parametrize("policy", [REJECTION, COUPLED])
def test_a_row_that_is_not_sure_enough_has_no_draft_whatever_would_have_been_drawn(
    policy: VerificationPolicy,
) -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().repeat(8, 1)
    transport = DraftProbsTransport.COUPLED if policy is COUPLED else SPARSE
    rows = [Row(make_spec(policy, transport), (1, *range(length))) for length in range(8)]
    drafts, sent = sample_drafts(logits.clone(), rows, 0.51)
    assert (drafts, sent) == ([-1] * 8, [None] * 8)
    surely, _ = sample_drafts(logits.clone(), rows, 0.49)
    assert surely == sample_drafts(logits.clone(), rows)[0]
    assert len(set(surely)) > 1
