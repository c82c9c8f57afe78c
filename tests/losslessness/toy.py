"""A toy cell: all three services in this process, over loopback, around engines without a model."""

import asyncio
from collections.abc import Callable
from functools import partial

from draft_service.proposers.base import Proposer
from draft_service.proposers.draft_model import DraftModelProposer
from engine.backends.toy_backend import ToyEngine
from orchestrator.server import OrchestratorSettings
from tandem.rng import F64
from tests import every_proposer
from tests.losslessness import toy_model
from tests.losslessness.adversaries import ADVERSARIES, Adversary
from tests.losslessness.answers import Answer, Request, collect
from tests.losslessness.cells import Cell
from tests.losslessness.suspects import of_engine, of_function, of_prompt_lookup
from tests.losslessness.transform import LogQ, Reference, uniforms
from tests.losslessness.wrong_rules import in_force
from tests.orchestrator.services import VOCABULARY, all_services, toy_engine

CONCURRENCY = 64
_SETTINGS = OrchestratorSettings(draft_timeout_s=120.0)  # a busy machine is no reason to decode without drafts


def run(cell: Cell, num_tokens: int) -> tuple[list[Answer], F64]:
    """The cell's answers, and the numbers [O, num_tokens] of their first `num_tokens` tokens."""
    answers = asyncio.run(_answers(cell, num_tokens))
    return answers, uniforms(reference(cell.drafts), answers, num_tokens, cell.seed)


async def _answers(cell: Cell, num_tokens: int) -> list[Answer]:
    def make_request(number: int) -> Request:
        return cell.request(number, (number % toy_model.EOS, number // toy_model.EOS % toy_model.EOS))

    with in_force(cell.rule):
        async with all_services(proposer_maker(cell.drafts), _target_engine(), _SETTINGS) as services:
            return await collect(services.client, make_request, num_tokens, CONCURRENCY)


def proposer_maker(drafts: str) -> Callable[[], Proposer]:
    """What makes a fresh proposer of this name."""
    if drafts in ADVERSARIES:
        return partial(Adversary, ADVERSARIES[drafts])
    return partial(every_proposer.make_registered, drafts, _draft_model)


def reference(drafts: str) -> Reference:
    """The toy target, and what drafts of this name are like."""
    return Reference(_target_engine(), VOCABULARY.eos_token_ids, _suspect(drafts))


def _suspect(drafts: str) -> LogQ:
    if drafts in ADVERSARIES:
        return of_function(ADVERSARIES[drafts])
    return (
        of_engine(_draft_engine())
        if every_proposer.stands_on_a_model(drafts)
        else of_prompt_lookup(toy_model.VOCAB)
    )


def _target_engine() -> ToyEngine:
    return toy_engine(toy_model.target_logits)


def _draft_engine() -> ToyEngine:
    return toy_engine(toy_model.draft_logits)


def _draft_model() -> DraftModelProposer:
    return DraftModelProposer(_draft_engine(), "toy", VOCABULARY.id_bytes_hash)
