"""Requests as their cells say, and answers in the order of their requests."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.requests import Offer, check_request
from tandem.client_request import build_request
from tandem.types import DraftProbsTransport, ModelInfo
from tests.losslessness import toy_model
from tests.losslessness.answers import collect
from tests.losslessness.cells import CELLS, MIXES, WRONG_CELLS, Cell
from tests.orchestrator.services import VOCABULARY

OFFER = Offer(
    vocabulary=VOCABULARY,
    model=ModelInfo(model_id="toy"),
    vocab_size=toy_model.VOCAB,
    max_context=512,
    num_draft_tokens=4,
    max_draft_tokens=16,
    draft_transports=frozenset(DraftProbsTransport),
)


def test_cells_have_names_and_seeds_of_their_own() -> None:
    cells = (*CELLS, *WRONG_CELLS)
    assert len({cell.name for cell in cells}) == len({cell.seed for cell in cells}) == len(cells)


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.policy == "block"], ids=lambda cell: cell.name)
def test_the_session_that_answers_are_held_against_is_the_one_that_was_asked_for(cell: Cell) -> None:
    for number in range(len(MIXES[cell.mix])):
        request = cell.request(number, (1, 2))
        asked = check_request(build_request(request.prompt_ids, **request.options), OFFER).spec
        ours = request.spec([toy_model.EOS])
        assert (asked.sampling, asked.max_tokens, asked.min_tokens) == (
            ours.sampling,
            ours.max_tokens,
            ours.min_tokens,
        )
        assert (asked.ending_token_ids, asked.token_ids) == (ours.ending_token_ids, ours.token_ids)
        assert (asked.verification_policy, asked.draft_probs_transport) == (cell.policy, cell.transport)


class Result:
    def __init__(self, num_tokens: int) -> None:
        self.token_ids = (1,) * num_tokens


class Client:
    """Answers of 1 .. 5 tokens by the request's number; the later a request of three, the sooner its answer."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_ended = 0
        self.num_ended_early = 0  # before an earlier request

    async def complete(self, prompt_ids: tuple[int, ...], **options: Any) -> Result:
        number = self.num_asked
        self.num_asked += 1
        for _ in range(9 - 3 * (number % 3)):
            await asyncio.sleep(0)
        self.num_ended_early += number > self.num_ended
        self.num_ended += 1
        return Result(1 + number % 5)


@pytest.mark.parametrize("concurrency", [1, 3, 7])
def test_answers_are_the_first_that_hold_enough_tokens_whatever_ends_first(concurrency: int) -> None:
    client, cell = Client(), replace(CELLS[0], max_tokens=5)
    answers = asyncio.run(collect(client, lambda n: cell.request(n, (n,)), 61, concurrency))  # type: ignore[arg-type]
    assert [answer.request.prompt_ids for answer in answers] == [
        (n,) for n in range(21)
    ]  # 4 x (1 + .. + 5), then 1
    assert client.num_asked < 21 + 2 * concurrency
    assert client.num_ended_early > 0 or concurrency == 1
