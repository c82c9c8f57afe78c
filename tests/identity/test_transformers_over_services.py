"""Drafts and targets on different backends: every answer is what its target decodes alone."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draft_service.proposers.draft_model import DraftModelProposer
from engine.backends.base import SpeculativeEngine
from engine.backends.torch_loading import load_torch_engine
from engine.models.config import LoadedModel
from engine.models.weight_names import expected_shapes
from orchestrator.server import OrchestratorSettings
from tests.engine import tiny_transformers as tiny
from tests.fixtures.tiny_models import CONFIGS, random_model, write_hf_directory
from tests.orchestrator.services import VOCAB, VOCABULARY, all_services, token_lists

PROMPTS = [f"{'ab' * n} number {n}" for n in range(5)]
GREEDY: dict[str, Any] = {"temperature": 0.0}
COUPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3, "seed": 11}

TARGET = random_model(replace(CONFIGS["llama"], vocab_size=VOCAB, num_layers=3), seed=1)
_SHALLOW = replace(TARGET.config, num_layers=2)
DRAFT = LoadedModel(_SHALLOW, {name: TARGET.weights[name] for name in expected_shapes(_SHALLOW)})

Engine = Callable[[LoadedModel, Path], SpeculativeEngine]


def native(model: LoadedModel, directory: Path) -> SpeculativeEngine:
    return load_torch_engine(model, kv_memory_bytes=1 << 20, max_step_tokens=64)


def transformers(model: LoadedModel, directory: Path) -> SpeculativeEngine:
    return tiny.load(write_hf_directory(directory, model))


async def check(target: SpeculativeEngine, draft: SpeculativeEngine) -> None:
    patient = OrchestratorSettings(draft_timeout_s=60.0)  # a busy machine is not a failed draft
    proposer = DraftModelProposer(draft, "draft", VOCABULARY.id_bytes_hash)
    async with all_services(lambda: proposer, target, patient) as stack:
        for sampling in (GREEDY, COUPLED):
            options = {"max_tokens": 24, "ignore_eos": True, **sampling}
            plain = [(await token_lists(stack, [p], speculation=False, **options))[0] for p in PROMPTS]
            assert await token_lists(stack, PROMPTS, num_draft_tokens=3, **options) == plain
            result = await stack.client.complete(PROMPTS[0], num_draft_tokens=3, **options)
            assert 0 < result.speculation.num_accepted < result.speculation.num_draft_tokens
        await stack.until_idle()


@pytest.mark.parametrize(
    ("target", "draft"),
    [(transformers, native), (native, transformers), (transformers, transformers)],
    ids=["native draft", "native target", "both transformers"],
)
def test_texts_are_the_targets_own_whichever_backend_either_runs_on(
    target: Engine, draft: Engine, tmp_path: Path
) -> None:
    engines = target(TARGET, tmp_path / "target"), draft(DRAFT, tmp_path / "draft")
    assert all(engine.capabilities.deterministic for engine in engines)
    asyncio.run(asyncio.wait_for(check(*engines), 120))
