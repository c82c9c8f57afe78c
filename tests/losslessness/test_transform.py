"""From tokens to numbers: by hand, in simulation, and against plain decoding's own rows."""

import numpy as np
import pytest
import torch

from engine.backends.base import SequenceInput
from engine.sampling.processors import process
from engine.sampling.rows import Row
from tandem.rng import F64
from tests.losslessness import toy_model
from tests.losslessness.cells import CELLS, MIXES
from tests.losslessness.statistics import bins_of_numbers
from tests.losslessness.suspects import of_prompt_lookup
from tests.losslessness.transform import ImpossibleTokenError, target_rows, transform
from tests.orchestrator.services import toy_engine

P = [0.5, 0.3, 0.2]


def numbers_of(p: list[float], q: list[float], token_id: int, draw: float) -> list[float]:
    """U in both orders."""
    log_p, log_q = torch.tensor([p]).log(), torch.tensor([q]).log()
    return [float(row[0]) for row in transform(log_p, log_q, [token_id], np.array([draw]))]


def test_a_token_lies_behind_those_that_are_likelier_and_those_that_drafts_favour_less() -> None:
    # By p: 0, 1, 2. By p / q, which is 0.83, 1.5, 1: 1, 2, 0.
    q = [0.6, 0.2, 0.2]
    assert numbers_of(P, q, 0, 0.5) == pytest.approx([0.25, 0.75])
    assert numbers_of(P, q, 1, 0.5) == pytest.approx([0.65, 0.15])
    assert numbers_of(P, q, 2, 0.25) == pytest.approx([0.85, 0.35])


def test_a_one_hot_draft_comes_last_and_the_others_by_p() -> None:
    q = [1.0, 0.0, 0.0]
    assert numbers_of(P, q, 1, 0.5) == pytest.approx([0.65, 0.15])
    assert numbers_of(P, q, 2, 0.5) == pytest.approx([0.9, 0.4])
    assert numbers_of(P, q, 0, 0.5) == pytest.approx([0.25, 0.75])


def test_equal_tokens_come_by_id_and_constants_do_not_matter() -> None:
    assert numbers_of([0.25] * 4, [0.25] * 4, 2, 0.5) == pytest.approx([0.625, 0.625])
    assert numbers_of([5.0, 3.0, 2.0], [6.0, 2.0, 2.0], 2, 0.25) == pytest.approx([0.85, 0.35])


def test_masked_tokens_take_no_room_whatever_q_says_of_them() -> None:
    for q in ([0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [1 / 3] * 3):
        assert numbers_of([0.0, 1.0, 0.0], q, 1, 0.25) == pytest.approx([0.25, 0.25])


def test_a_token_without_probability_is_named() -> None:
    log_p = torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log()
    with pytest.raises(ImpossibleTokenError, match="token 1 at output index 1 has probability 0"):
        transform(log_p, torch.zeros(2, 2), [0, 1], np.array([0.5, 0.5]))


def test_tokens_sampled_from_p_give_uniform_numbers_in_both_orders_and_others_do_not() -> None:
    generator = np.random.default_rng(5)
    log_p, log_q = generator.gumbel(size=(2, 4000, 24)).astype(np.float32)
    log_p[:, 20:] = -np.inf
    noise = generator.gumbel(size=log_p.shape)
    draws = generator.random(len(log_p))

    def p_values(scores: F64) -> list[float]:
        """Of tokens by p and by p / q."""
        token_ids = scores.argmax(axis=1).tolist()
        numbers = transform(torch.from_numpy(log_p), torch.from_numpy(log_q), token_ids, draws)
        return [bins_of_numbers(row).p_value for row in numbers]

    assert min(p_values(log_p + noise)) > 0.01
    too_sure = p_values(1.2 * log_p + noise)
    assert too_sure[0] < 1e-6
    leaning_to_the_draft = p_values(log_p + 0.2 * log_q + noise)
    assert leaning_to_the_draft[0] > 0.001
    assert leaning_to_the_draft[1] < 1e-6


@pytest.mark.parametrize("options", MIXES["processors"])
def test_an_answer_is_held_against_plain_decoding_step_by_step(options: dict[str, object]) -> None:
    prompt_ids, token_ids = (3, 7, 3), [9, 3, 7, 7, 11, 9, 12, 20, 7, 7, 5, 4, 63]
    cell = next(cell for cell in CELLS if cell.mix == "processors")
    number = MIXES["processors"].index(options)
    spec = cell.request(number, prompt_ids).spec([toy_model.EOS])
    rows = target_rows(toy_engine(toy_model.target_logits), spec, token_ids)
    engine = toy_engine(toy_model.target_logits)
    sequence_id, pending = engine.create(), list(prompt_ids)
    for index in range(len(token_ids)):
        logits = engine.forward_per_position_logits([SequenceInput(sequence_id, pending, 1)])
        history = (*prompt_ids, *token_ids[:index])
        assert torch.equal(process(logits, [Row(spec, history)])[0], rows[index])
        pending = [token_ids[index]]
    assert engine.num_cached_tokens(sequence_id) == len(prompt_ids) + len(token_ids) - 1


def test_prompt_lookups_guess_is_what_followed_the_same_token_before() -> None:
    q = of_prompt_lookup(16)((4, 9, 5, 4, 9), 2).exp()
    assert torch.equal(q[1], torch.eye(16, dtype=torch.float64)[9])  # after 4, 9, 5, 4
    assert torch.allclose(
        of_prompt_lookup(16)((4, 9, 5), 1).exp(), torch.full((1, 16), 1 / 16, dtype=torch.float64)
    )
