"""Faults reported about other systems, as whole generations over a toy engine: each equals plain decoding."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.backends.base import SequenceInput
from engine.backends.toy_backend import ToyEngine, hashed_logits, scripted_logits
from engine.sampling.policies import Decision, VerifyRows, rows_of, verify
from engine.sampling.processors import process
from engine.sampling.rows import Row
from tandem.types import DraftProbsTransport, FinishReason, Proposal, SessionSpec, VerificationPolicy
from target_service.verifier import cut
from tests.sampling.helpers import P4, PROMPT, logits_of, make_spec, sample, sparse, worst_deviation
from tests.sampling.rounds import emitted_tokens, one_more_draft
from tests.sampling.tables import Prefix
from tests.sampling.test_rounds_exact import deviation

Drafter = Callable[[Sequence[int]], tuple[int, ...]]  # committed tokens -> drafts
GREEDY, COUPLED, REJECTION, BLOCK = VerificationPolicy
ONE_HOT = DraftProbsTransport.ONE_HOT
RATIO_TESTS = pytest.mark.parametrize("policy", [REJECTION, BLOCK])
SAMPLED = pytest.mark.parametrize("policy", [COUPLED, REJECTION, BLOCK])
PLAIN_TOKENS = pytest.mark.parametrize(  # those that give plain decoding's tokens, whatever the drafts
    ("policy", "temperature"), [(GREEDY, 0.0), (COUPLED, 1.0), (REJECTION, 0.0), (BLOCK, 0.0)]
)


def generate(engine: ToyEngine, spec: SessionSpec, num_tokens: int, drafter: Drafter) -> list[int]:
    """Rounds of propose, verify, commit until `num_tokens` are out; the output tokens."""
    return generate_together(engine, [(spec, num_tokens, drafter)])[0]


def generate_together(engine: ToyEngine, sessions: Sequence[tuple[SessionSpec, int, Drafter]]) -> list[list[int]]:
    """The same for several sessions, every round of all those that still run in one batch."""
    sequence_ids = [engine.create() for _ in sessions]
    committed = [list(spec.token_ids) for spec, _, _ in sessions]
    while running := [
        index for index, (spec, num, _) in enumerate(sessions) if len(committed[index]) < spec.prompt_len + num
    ]:
        requests = [
            VerifyRows(sessions[index][0], tuple(committed[index]), Proposal(sessions[index][2](committed[index])))
            for index in running
        ]
        inputs = []
        for index, request in zip(running, requests, strict=True):
            missing = committed[index][engine.num_cached_tokens(sequence_ids[index]) :]
            pending = [*missing, *request.proposal.draft_token_ids]
            inputs.append(SequenceInput(sequence_ids[index], pending, request.num_rows))
        processed = process(engine.forward_per_position_logits(inputs), rows_of(requests))
        for index, request, decision in zip(running, requests, verify(processed, requests), strict=True):
            drafts = request.proposal.draft_token_ids[: decision.num_accepted]
            committed[index] += [*drafts, decision.next_token_id]
            engine.truncate(sequence_ids[index], len(committed[index]) - 1)
    for sequence_id in sequence_ids:
        engine.release(sequence_id)
    return [
        tokens[spec.prompt_len : spec.prompt_len + num]
        for tokens, (spec, num, _) in zip(committed, sessions, strict=True)
    ]


def no_drafts(committed: Sequence[int]) -> tuple[int, ...]:
    return ()


def always(*drafts: int) -> Drafter:
    """The same drafts in every round."""
    return lambda _: drafts


def repeat_history(committed: Sequence[int]) -> tuple[int, ...]:
    """Four drafts: the last token again, and what followed it before."""
    last = committed[-1]
    for index in range(len(committed) - 2, -1, -1):
        if committed[index] == last:
            return tuple([*committed[index + 1 :], last, last, last, last][:4])
    return (last,) * 4


def toy(vocab_size: int = 16, scale: float = 1.0) -> ToyEngine:
    return ToyEngine(hashed_logits(vocab_size, seed=5, scale=scale), vocab_size)


@PLAIN_TOKENS
def test_penalties_act_on_draft_rows_as_on_plain_ones(policy: VerificationPolicy, temperature: float) -> None:
    outputs = []
    for penalty in (2.0, -2.0):
        spec = make_spec(policy, temperature=temperature, frequency_penalty=penalty, prompt=(4, 4, 4))
        plain = generate(toy(), spec, 24, no_drafts)
        assert generate(toy(), spec, 24, repeat_history) == plain
        outputs.append(plain)
    assert outputs[0] != outputs[1]
    assert len(set(outputs[0])) > len(set(outputs[1]))


@RATIO_TESTS
@pytest.mark.parametrize("penalty", [2.0, -2.0])
def test_penalties_bend_ratio_tests_as_they_bend_plain_decoding(policy: VerificationPolicy, penalty: float) -> None:
    assert deviation(policy, (3,), ONE_HOT, zeros=0.0, frequency_penalty=penalty) < 1e-9


@SAMPLED
def test_a_token_biased_away_is_in_no_output(policy: VerificationPolicy) -> None:
    banned = generate(toy(), make_spec(temperature=0.0), 1, no_drafts)[0]
    for seed in range(20):
        spec = make_spec(policy, ONE_HOT, seed=seed, logit_bias={banned: -100.0})
        output = generate(toy(), spec, 12, lambda committed: (banned, banned, committed[-1], banned))
        assert banned not in output


@SAMPLED
def test_min_p_holds_at_every_emitted_position(policy: VerificationPolicy) -> None:
    logits_at = hashed_logits(16, seed=5, scale=0.2)
    for seed in range(10):
        spec = make_spec(policy, ONE_HOT, seed=seed, min_p=0.9)
        output = generate(toy(scale=0.2), spec, 12, repeat_history)
        for index, token in enumerate(output):
            logits = logits_at([*PROMPT, *output[:index]]).astype(np.float64)
            assert np.exp(logits[token] - logits.max()) >= 0.9 - 1e-6


@SAMPLED
def test_top_p_filters_the_verified_row_too(policy: VerificationPolicy) -> None:
    counts = np.zeros(4)
    for position in range(3, 1003):
        spec = make_spec(policy, ONE_HOT, top_p=0.75)
        request = VerifyRows(spec, range(position), Proposal((position % 4,)))
        processed = process(logits_of(P4).repeat(2, 1), rows_of([request]))
        decision = verify(processed, [request])[0]
        counts[position % 4 if decision.num_accepted else decision.next_token_id] += 1
    assert worst_deviation(counts, [0.625, 0.375, 0, 0]) < 5


def test_sessions_with_many_few_and_no_drafts_in_one_batch_emit_what_each_emits_alone() -> None:
    drafters = [repeat_history, no_drafts, always(3), lambda committed: (5, 5) if len(committed) % 3 else ()]
    sessions = [
        (make_spec(policy, ONE_HOT, temperature=temperature, seed=seed), 6 + 2 * seed, drafters[seed])
        for policy, temperature in ((GREEDY, 0.0), (COUPLED, 0.8), (REJECTION, 0.8), (BLOCK, 0.8))
        for seed in range(4)
    ]
    together = generate_together(toy(), sessions)
    assert together == [generate(toy(), *session) for session in sessions]
    assert generate_together(toy(), sessions[::-1])[::-1] == together


@pytest.mark.parametrize("policy", VerificationPolicy)
@pytest.mark.parametrize("index", range(4))
def test_an_ending_token_among_accepted_drafts_ends_the_round_there(policy: VerificationPolicy, index: int) -> None:
    temperature = 0.0 if policy is GREEDY else 1.0
    logits_at = hashed_logits(16, seed=5, scale=1.0)

    def target(prefix: Prefix) -> torch.Tensor:
        return torch.from_numpy(logits_at([*PROMPT, *prefix]))

    spec = make_spec(policy, DraftProbsTransport.FULL, temperature=temperature)
    proposal = Proposal()
    for _ in range(4):
        proposal = one_more_draft(spec, target, PROMPT, proposal)  # a target that is its own draft
    tokens = emitted_tokens(spec, target, PROMPT, proposal)
    assert tokens[:4] == proposal.draft_token_ids
    ending = replace(spec, eos_token_ids=frozenset({tokens[index]}))
    verdict = cut(VerifyRows(ending, PROMPT, proposal), Decision(4, tokens[4]))
    assert verdict.token_ids == tokens[: tokens.index(tokens[index]) + 1]
    assert verdict.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("policy", VerificationPolicy)
def test_a_rejected_ending_token_ends_nothing(policy: VerificationPolicy) -> None:
    eos, temperature = 9, 0.0 if policy is GREEDY else 1.0
    spec = make_spec(policy, ONE_HOT, temperature=temperature, eos=frozenset({eos}), logit_bias={eos: -100.0})
    output = generate(toy(), spec, 20, always(eos, eos, eos))
    assert len(output) == 20
    assert eos not in output
    request = VerifyRows(spec, PROMPT, Proposal((eos,)))
    assert cut(request, Decision(0, output[0])).finish_reason is None


@pytest.mark.parametrize("min_tokens", range(7))
@pytest.mark.parametrize("policy", VerificationPolicy)
def test_an_ending_token_first_comes_at_output_index_min_tokens(
    min_tokens: int, policy: VerificationPolicy
) -> None:
    eos, temperature = 9, 0.0 if policy is GREEDY else 0.5
    engine = ToyEngine(scripted_logits([3, eos], 16, start=len(PROMPT)), 16)
    spec = make_spec(policy, ONE_HOT, temperature=temperature, min_tokens=min_tokens, eos=frozenset({eos}))
    plain = generate(engine, spec, 10, no_drafts)
    for drafter in (no_drafts, always(3, eos, 3, eos), always(eos, eos, eos, eos)):
        output = generate(engine, spec, 10, drafter)
        # The script asks for the ending token at every odd index.
        assert output.index(eos) == min_tokens + (min_tokens + 1) % 2
        assert output == plain or policy.is_ratio_test


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 0.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tiny_temperatures_decode_greedily_where_the_gap_allows(temperature: float, dtype: torch.dtype) -> None:
    logits = (torch.randn((200, 64), generator=torch.Generator().manual_seed(2)) * 4).to(dtype).float()
    best = logits.topk(2).values
    clear = (best[:, 0] - best[:, 1]) > 20 * temperature
    rows = [Row(make_spec(temperature=temperature, top_p=0.9), range(3 + n)) for n in range(200)]
    chosen = torch.tensor(sample(process(logits.clone(), rows), rows))
    if temperature <= 1e-5:
        assert torch.equal(chosen, logits.argmax(-1))
    assert torch.equal(chosen[clear], logits.argmax(-1)[clear])
    assert clear.sum() > 150


@SAMPLED
@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 2e-5, 1e-5, 1e-12])
def test_tiny_temperatures_verify_greedily(policy: VerificationPolicy, temperature: float) -> None:
    logits = torch.tensor([-60000.0, 3.0, 20.0, 19.5, 60000.0])
    for transport, sent in (
        (ONE_HOT, ()),
        (DraftProbsTransport.SPARSE, (sparse([0.25, 0.0, 0.5, 0.0, 0.25]),) * 2),
    ):
        spec = make_spec(policy, transport, temperature=temperature, top_p=0.9)
        for drafts, decision in (((4, 4), Decision(2, 4)), ((4, 2), Decision(1, 4)), ((0, 4), Decision(0, 4))):
            request = VerifyRows(spec, PROMPT, Proposal(drafts, sent))
            assert verify(process(logits.repeat(3, 1), rows_of([request])), [request]) == [decision]


@pytest.mark.parametrize("policy", VerificationPolicy)
def test_a_seed_decides_a_speculative_output_and_another_seed_another(policy: VerificationPolicy) -> None:
    temperature = 0.0 if policy is GREEDY else 2.0
    same, other = (make_spec(policy, ONE_HOT, temperature=temperature, seed=seed) for seed in (42, 43))
    first = generate(toy(), same, 16, repeat_history)
    neighbours = [(make_spec(policy, ONE_HOT, seed=seed), 20, always(2, 2)) for seed in range(7)]
    assert generate_together(toy(), [*neighbours, (same, 16, repeat_history)])[-1] == first
    assert (generate(toy(), other, 16, repeat_history) != first) == (policy is not GREEDY)


def test_a_seed_decides_everything_whatever_else_is_in_the_batch() -> None:
    rows = [Row(make_spec(seed=42 + n % 2, temperature=2.0), range(3 + n // 2)) for n in range(16)]
    logits = torch.randn((16, 500), generator=torch.Generator().manual_seed(6))
    logits[1::2] = logits[::2]
    together = sample(process(logits.clone(), rows), rows)
    for index, row in enumerate(rows):
        assert sample(process(logits[index : index + 1].clone(), [row]), [row]) == [together[index]]
    assert together[::2] != together[1::2]


def test_answers_to_one_prompt_differ_by_sample_index() -> None:
    outputs = {tuple(generate(toy(), make_spec(sample_index=n), 12, no_drafts)) for n in range(4)}
    assert len(outputs) == 4
