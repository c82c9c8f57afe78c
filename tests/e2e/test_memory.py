"""The memory of a target process on the real model is its weights, its pool and a stated rest."""

import asyncio

import pytest
import torch

from engine.models.loading import load_model
from loadtest.memory import TOLERANCE, plan_memory, resident_bytes
from tandem.client import GenerateOptions, TandemClient
from tandem.processes import ClusterPlan, LocalCluster
from tests.e2e.deployment import MODEL
from tests.fixtures.demo_model import demo_model_dir

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(torch.version.cuda is not None, reason="the stated rest is of torch's CPU build"),
]

DTYPE, BLOCK_SIZE = "float32", 16
NUM_SESSIONS, PROMPT_LEN, NUM_TOKENS = 12, 496, 48
NUM_BLOCKS = NUM_SESSIONS * (PROMPT_LEN + NUM_TOKENS) // BLOCK_SIZE  # the sessions together fill the pool


async def fill_pool(address: str) -> tuple[int, int]:
    """Run sessions that fill the pool together -> its blocks, and the most of them in use at once."""
    options = GenerateOptions(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, speculation=False)
    most_used, total = 0, 0
    async with TandemClient(address) as client:
        # No two begin alike, so that none can use another's blocks.
        prompts = [range(1000 * (n + 1), 1000 * (n + 1) + PROMPT_LEN) for n in range(NUM_SESSIONS)]
        running = asyncio.gather(*(client.complete(prompt, **options) for prompt in prompts))
        while not running.done():
            load = (await client.info()).target_load
            assert load is not None
            most_used, total = max(most_used, load.used_blocks), load.total_blocks
            await asyncio.sleep(0.02)
        results = await running
    assert [len(result.token_ids) for result in results] == [NUM_TOKENS] * NUM_SESSIONS
    return total, most_used


def test_resident_memory_is_weights_and_pool_and_the_stated_rest() -> None:
    model = load_model(demo_model_dir())
    memory = plan_memory(model, DTYPE, NUM_BLOCKS, BLOCK_SIZE)
    assert memory.kv_per_token == 2 * 30 * 3 * 64 * 4  # keys and values, layers, heads, head size, bytes
    target = ["--model", MODEL, "--dtype", DTYPE, "--kv-memory", str(memory.pool)]
    plan = ClusterPlan(target=target, draft=None, orchestrator=["--model", MODEL])
    with LocalCluster(plan, quiet=True) as cluster:
        total, most_used = asyncio.run(fill_pool(cluster.addresses["orchestrator"]))
        resident = resident_bytes(cluster.services[0].process.pid)
    assert total == NUM_BLOCKS
    assert most_used > 0.9 * NUM_BLOCKS
    assert resident == pytest.approx(memory.total, rel=TOLERANCE)
    assert resident - memory.pool < (1 - TOLERANCE) * memory.total  # a missing pool would be noticed
