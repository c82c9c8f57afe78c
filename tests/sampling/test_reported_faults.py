"""Faults reported about other systems, as whole generations over a toy engine: each equals plain decoding."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from engine.backends.base import SequenceInput
from engine.backends.toy_backend import ToyEngine, hashed_logits, scripted_logits
from engine.sampling.policies import VerifyRows, rows_of, verify
from engine.sampling.processors import process
from engine.sampling.rows import Row
from tandem.types import DraftProbsTransport, Proposal, SessionSpec, VerificationPolicy
from tests.sampling.helpers import P4, PROMPT, logits_of, make_spec, sample, worst_deviation

Drafter = Callable[[Sequence[int]], tuple[int, ...]]  # committed tokens -> drafts
ONE_HOT = DraftProbsTransport.ONE_HOT


def generate(engine: ToyEngine, spec: SessionSpec, num_tokens: int, drafter: Drafter) -> list[int]:
    """Rounds of propose, verify, commit until `num_tokens` are out; the output tokens."""
    sequence_id, committed = engine.create(), list(spec.token_ids)
    while len(committed) < spec.prompt_len + num_tokens:
        request = VerifyRows(spec, tuple(committed), Proposal(drafter(committed)))
        drafts = request.proposal.draft_token_ids
        pending = [*committed[engine.num_cached_tokens(sequence_id) :], *drafts]
        logits = engine.forward_per_position_logits([SequenceInput(sequence_id, pending, request.num_rows)])
        decision = verify(process(logits, rows_of([request])), [request])[0]
        committed += [*drafts[: decision.num_accepted], decision.next_token_id]
        engine.truncate(sequence_id, len(committed) - 1)
    engine.release(sequence_id)
    return committed[spec.prompt_len : spec.prompt_len + num_tokens]


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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_act_on_draft_rows_as_on_plain_ones(temperature: float) -> None:
    outputs = []
    for penalty in (2.0, -2.0):
        spec = make_spec(temperature=temperature, frequency_penalty=penalty, prompt=(4, 4, 4))
        plain = generate(toy(), spec, 24, no_drafts)
        assert generate(toy(), spec, 24, repeat_history) == plain
        outputs.append(plain)
    assert outputs[0] != outputs[1]
    assert len(set(outputs[0])) > len(set(outputs[1]))


def test_a_token_biased_away_is_in_no_output() -> None:
    banned = generate(toy(), make_spec(temperature=0.0), 1, no_drafts)[0]
    for policy in (VerificationPolicy.COUPLED, VerificationPolicy.REJECTION):
        for seed in range(20):
            spec = make_spec(policy, ONE_HOT, seed=seed, logit_bias={banned: -100.0})
            output = generate(toy(), spec, 12, lambda committed: (banned, banned, committed[-1], banned))
            assert banned not in output


@pytest.mark.parametrize("policy", [VerificationPolicy.COUPLED, VerificationPolicy.REJECTION])
def test_min_p_holds_at_every_emitted_position(policy: VerificationPolicy) -> None:
    logits_at = hashed_logits(16, seed=5, scale=0.2)
    for seed in range(10):
        spec = make_spec(policy, ONE_HOT, seed=seed, min_p=0.9)
        output = generate(toy(scale=0.2), spec, 12, repeat_history)
        for index, token in enumerate(output):
            logits = logits_at([*PROMPT, *output[:index]]).astype(np.float64)
            assert np.exp(logits[token] - logits.max()) >= 0.9 - 1e-6


@pytest.mark.parametrize("policy", [VerificationPolicy.COUPLED, VerificationPolicy.REJECTION])
def test_top_p_filters_the_verified_row_too(policy: VerificationPolicy) -> None:
    counts = np.zeros(4)
    for position in range(3, 1003):
        spec = make_spec(policy, ONE_HOT, top_p=0.75)
        request = VerifyRows(spec, range(position), Proposal((position % 4,)))
        processed = process(logits_of(P4).repeat(2, 1), rows_of([request]))
        decision = verify(processed, [request])[0]
        counts[position % 4 if decision.num_accepted else decision.next_token_id] += 1
    assert worst_deviation(counts, [0.625, 0.375, 0, 0]) < 5


@pytest.mark.parametrize("min_tokens", range(7))
def test_an_ending_token_first_comes_at_output_index_min_tokens(min_tokens: int) -> None:
    eos = 9
    for temperature in (0.0, 1.0):
        engine = ToyEngine(scripted_logits([3, eos], 16, start=len(PROMPT)), 16)
        spec = make_spec(temperature=temperature, min_tokens=min_tokens, eos=frozenset({eos}))
        plain = generate(engine, spec, 10, no_drafts)
        assert generate(engine, spec, 10, always(3, eos, 3, eos)) == plain
        assert generate(engine, spec, 10, always(eos, eos, eos, eos)) == plain
        # The script asks for the ending token at every odd index.
        assert plain.index(eos) == min_tokens + (min_tokens + 1) % 2


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
