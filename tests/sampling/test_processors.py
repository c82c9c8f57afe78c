"""Processors: order, masks, ties, rows on their own, and the naive reference."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.sampling.processors import argmax_decides, needs_no_logits, process
from engine.sampling.rows import Row
from tandem.types import LogprobsOptions, SamplingParams
from tests.sampling.helpers import P4, PROMPT, logits_of, make_spec

INF = math.inf


def processed(logits: Sequence[float], row: Row) -> list[float]:
    values = process(torch.tensor([logits], dtype=torch.float32), [row])[0].tolist()
    return [float(value) for value in values]


def naive(logits: Sequence[float], row: Row) -> list[float]:
    """One token at a time, in the order the design states."""
    spec, sampling = row.spec, row.spec.sampling
    history = [*row.committed_token_ids, *row.draft_token_ids]
    output = history[spec.prompt_len :]
    values = [float(np.float32(value)) for value in logits]
    for token, bias in sampling.logit_bias.items():
        values[token] += bias
    for token in set(history):
        value = values[token]
        values[token] = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
    for token in set(output):
        values[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    allowed, everything = set(sampling.allowed_token_ids), set(range(len(values)))
    ending = set(spec.ending_token_ids) if len(output) < spec.min_tokens else set()
    for masked in (everything - allowed if allowed else set(), set(sampling.bad_token_ids), ending):
        kept = [value if token not in masked else -INF for token, value in enumerate(values)]
        values = kept if max(kept) > -INF else values
    if sampling.is_greedy:
        return values
    if sampling.temperature != 1:
        values = [(value - max(values)) / sampling.temperature for value in values]
    order = sorted(everything, key=lambda token: (-values[token], token))
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    weights = [math.exp(values[token] - values[order[0]]) for token in order]
    probs, before = [weight / sum(weights) for weight in weights], 0.0
    kept_tokens: list[int] = []
    for token, prob in zip(order, probs, strict=True):
        assume(abs(before - sampling.top_p) > 1e-6)  # else rounding decides
        if before < sampling.top_p or not kept_tokens:
            kept_tokens.append(token)
        before += prob
    floor = values[order[0]] + math.log(sampling.min_p) if sampling.min_p else -INF
    assume(all(abs(value - floor) > 1e-4 for value in values))
    return [value if t in kept_tokens and value >= floor else -INF for t, value in enumerate(values)]


TOKENS = st.integers(0, 7)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_p=st.sampled_from([0.3, 0.71, 0.93, 1.0]),
    top_k=st.integers(0, 9),
    min_p=st.sampled_from([0.0, 0.0, 0.13]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, -1.5, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4, 2.0]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
    bad_token_ids=st.lists(TOKENS, max_size=4).map(tuple),
    allowed_token_ids=st.lists(TOKENS, max_size=3).map(tuple),
)


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=8, max_size=8),
    sampling=SAMPLING,
    output=st.lists(TOKENS, max_size=4),
    drafts=st.lists(TOKENS, max_size=3).map(tuple),
    min_tokens=st.integers(0, 5),
    eos=st.frozensets(TOKENS, max_size=2),
)
def test_a_row_is_processed_as_the_naive_reference_does(
    logits: list[float],
    sampling: SamplingParams,
    output: list[int],
    drafts: tuple[int, ...],
    min_tokens: int,
    eos: frozenset[int],
) -> None:
    fields = {name: getattr(sampling, name) for name in SamplingParams.__dataclass_fields__}
    spec = make_spec(min_tokens=min_tokens, eos=eos, **fields)
    row = Row(spec, [*PROMPT, *output], drafts)
    expected = naive(logits, row)
    result = processed(logits, row)
    assert [value == -INF for value in result] == [value == -INF for value in expected]
    assert result == pytest.approx(expected, abs=1e-4)
    assert max(result) > -INF


ALL_KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_p": 0.8},
    {"top_k": 7, "min_p": 0.1},
    {"temperature": 1.4, "top_p": 0.97, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"allowed_token_ids": tuple(range(0, 3000, 3)), "bad_token_ids": (3, 6), "logit_bias": {9: 4.0}},
]


def test_a_row_does_not_depend_on_the_rows_beside_it_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((24, 5003), generator=generator) * 3
    rows = [Row(make_spec(**ALL_KINDS[i % 6]), [*PROMPT, *range(i)], (5,) * (i % 3)) for i in range(24)]
    together = process(logits.clone(), rows)
    for index in range(24):
        alone = process(logits[index : index + 1].clone(), rows[index : index + 1])
        assert torch.equal(alone[0], together[index])
    backwards = process(logits.flip(0).clone(), rows[::-1]).flip(0)
    assert torch.equal(backwards, together)


def test_a_row_without_processors_keeps_its_bits() -> None:
    logits = torch.randn((2, 100), generator=torch.Generator().manual_seed(1))
    rows = [Row(make_spec(), PROMPT), Row(make_spec(temperature=0.0, top_k=3, top_p=0.1, min_p=0.5), PROMPT)]
    assert torch.equal(process(logits.clone(), rows), logits)


def test_top_k_keeps_the_lowest_ids_among_equals() -> None:
    assert processed([1, 3, 3, 3, 0], Row(make_spec(top_k=2), PROMPT)) == [-INF, 3, 3, -INF, -INF]
    assert processed([1, 3, 3, 0, 1], Row(make_spec(top_k=3), PROMPT)) == [1, 3, 3, -INF, -INF]


def test_top_p_keeps_the_lowest_ids_among_equals_and_always_the_first() -> None:
    assert processed([0, 0, 0, 0], Row(make_spec(top_p=0.3), PROMPT)) == [0, 0, -INF, -INF]
    assert processed([0, 5, 5, 0], Row(make_spec(top_p=1e-6), PROMPT)) == [-INF, 5, -INF, -INF]


def test_top_p_three_quarters_of_the_toy_distribution_keeps_two_tokens() -> None:
    row = process(logits_of(P4)[None], [Row(make_spec(top_p=0.75), PROMPT)])[0]
    assert torch.softmax(row.double(), 0).tolist() == pytest.approx([0.625, 0.375, 0, 0])


@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_top_p_over_a_sorted_prefix_equals_sorting_the_whole_vocabulary(top_p: float, spread: float) -> None:
    values = np.random.default_rng(3).standard_normal(6000).astype(np.float32) * np.float32(spread)
    values = np.round(values, 2)  # many ties
    order = np.argsort(-values, kind="stable")
    weights = np.exp(values.astype(np.float64))
    before = np.concatenate([[0.0], np.cumsum((weights / weights.sum())[order])[:-1]])
    expected = np.sort(order[before < top_p])
    result = process(torch.from_numpy(values.copy())[None], [Row(make_spec(top_p=top_p), PROMPT)])[0]
    assert np.array_equal(np.flatnonzero(result.numpy() > -np.inf), expected)


def test_top_p_of_a_large_vocabulary_in_which_nothing_is_likely() -> None:
    result = process(torch.zeros(1, 20_480), [Row(make_spec(top_p=0.25), PROMPT)])[0]
    assert torch.equal(result, torch.cat((torch.zeros(5_120), torch.full((15_360,), -INF))))


def test_min_p_of_one_keeps_exactly_the_likeliest() -> None:
    assert processed([1, 2, 2, 0], Row(make_spec(min_p=1.0), PROMPT)) == [-INF, 2, 2, -INF]


def test_repetition_counts_the_prompt_and_the_others_only_output() -> None:
    prompt_only = Row(make_spec(presence_penalty=1.0, frequency_penalty=1.0), PROMPT)
    assert processed([1, 1, 1, 1, 1], prompt_only) == [1, 1, 1, 1, 1]
    repeated = Row(make_spec(repetition_penalty=2.0), PROMPT, (4,))
    assert processed([1, 1, -1, 1, 1], repeated) == [1, 0.5, -2, 0.5, 0.5]


def test_penalties_count_the_drafts_before_the_row() -> None:
    spec = make_spec(frequency_penalty=1.0)
    drafts = (0, 4, 4)
    rows = [Row(spec, [*PROMPT, 4], drafts[:i]) for i in range(4)]
    result = process(torch.zeros((4, 5)), rows)
    assert result[:, 4].tolist() == [-1, -1, -2, -3]
    assert result[:, 0].tolist() == [0, -1, -1, -1]


def test_two_requests_with_equal_prefixes_but_other_prompts_count_their_own_output() -> None:
    tokens = [1, 2, 3, 4]
    short, long = make_spec(prompt=(1,), presence_penalty=1.0), make_spec(prompt=(1, 2, 3), presence_penalty=1.0)
    result = process(torch.zeros((2, 5)), [Row(short, tokens), Row(long, tokens)])
    assert result.tolist() == [[0, 0, -1, -1, -1], [0, 0, 0, 0, -1]]


def test_ending_tokens_are_masked_until_min_tokens_are_out() -> None:
    spec = make_spec(min_tokens=2, eos=frozenset({0}))
    rows = [Row(spec, PROMPT, (4,) * i) for i in range(4)]
    assert [value == -INF for value in process(torch.ones((4, 5)), rows)[:, 0].tolist()] == [
        True,
        True,
        False,
        False,
    ]


def test_a_mask_that_would_leave_nothing_is_not_applied() -> None:
    ending_only = make_spec(allowed_token_ids=(2,), min_tokens=5, eos=frozenset({2}))
    assert processed([1, 1, 1, 1], Row(ending_only, PROMPT)) == [-INF, -INF, 1, -INF]
    all_bad = make_spec(bad_token_ids=(0, 1, 2, 3))
    assert processed([1, 2, 3, 4], Row(all_bad, PROMPT)) == [1, 2, 3, 4]


def test_ids_without_a_logit_are_skipped() -> None:
    spec = make_spec(
        logit_bias={1: 1.0, 99: 5.0}, bad_token_ids=(98,), repetition_penalty=2.0, frequency_penalty=1.0,
        min_tokens=9, eos=frozenset({97}),
    )  # fmt: skip
    assert processed([2, 2, 2, 2], Row(spec, [*PROMPT, 96])) == [2, 1.5, 1, 1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 2e-5, 1e-5, 1e-6, 1e-12, 0.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tiny_temperatures_give_no_nan_and_the_largest_logit(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[-60000.0, 3.0, 20.0, 19.5, 60000.0]]).to(dtype).float()
    for bias in ({}, {4: -100.0}):
        for top_p in (1.0, 0.9):
            row = Row(make_spec(temperature=temperature, logit_bias=bias, top_p=top_p), PROMPT)
            result = process(logits.clone(), [row])[0]
            probs = torch.softmax(result.double(), 0)
            assert not torch.isnan(probs).any()
            assert int(result.argmax()) == 4


def test_argmax_of_raw_logits_decides_only_without_an_active_processor() -> None:
    assert needs_no_logits(make_spec(temperature=0.0), 0)
    assert needs_no_logits(make_spec(temperature=1e-5, top_k=3, top_p=0.5, min_p=0.2), 0)
    assert not needs_no_logits(make_spec(), 0)
    fields: list[dict[str, Any]] = [
        {"logit_bias": {1: 0.5}}, {"allowed_token_ids": (1,)}, {"bad_token_ids": (1,)},
        {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1},
    ]  # fmt: skip
    for field in fields:
        assert not needs_no_logits(make_spec(temperature=0.0, **field), 0)
    waiting = make_spec(temperature=0.0, min_tokens=3, eos=frozenset({0}))
    assert [needs_no_logits(waiting, length) for length in (0, 2, 3)] == [False, False, True]


def test_argmax_decides_who_asks_for_logprobs_but_a_verdict_needs_their_logits() -> None:
    spec = replace(make_spec(temperature=0.0), logprobs=LogprobsOptions())
    assert argmax_decides(spec, 0)
    assert not needs_no_logits(spec, 0)


def test_a_wrong_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 1 rows"):
        process(torch.zeros((2, 4)), [Row(make_spec(), PROMPT)])
