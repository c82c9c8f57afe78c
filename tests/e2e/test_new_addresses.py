"""A replica that is killed while an answer runs and comes back at another address: real processes, named in files."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.client import TandemClient
from tandem.processes import ClusterPlan, LocalCluster

TOY = "hashed:vocab=512,seed=3"
COMMANDS = {
    "target": ["--toy", f"{TOY},delay_ms=10", "--address", "127.0.0.1:0"],
    "draft": ["--proposer", "draft_model", "--toy", TOY, "--address", "127.0.0.1:0"],
}
HANG_S = 240.0
OPTIONS: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "temperature": 0.8, "seed": 5}


async def until_connected(client: TandemClient, address: str) -> None:
    """Until the orchestrator has the replica at this address, and no other of its role."""
    while True:
        replicas = (await client.info()).replicas
        (role,) = [one.role for one in replicas if one.address == address] or [None]
        found = [(one.address, one.is_connected) for one in replicas if one.role == role]
        if found == [(address, True)]:
            return
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("role", COMMANDS)
def test_an_answer_is_the_same_and_the_next_one_has_drafts_again(role: str, tmp_path: Path) -> None:
    """grpc #8296, #28870: after a peer restarts at a new address the first calls fail, or all do."""
    plan = ClusterPlan(COMMANDS["target"][:2], COMMANDS["draft"][:4], ["--toy-vocab", "512"])
    with LocalCluster(plan, quiet=True) as cluster:
        files = {name: tmp_path / name for name in COMMANDS}
        for name, file in files.items():
            file.write_text(cluster.addresses[name])
        links = [word for name, file in files.items() for word in (f"--{name}", f"file:{file}")]
        second = cluster.start(role, COMMANDS[role])
        front = cluster.start("orchestrator", [*links, "--toy-vocab", "512", "--address", "127.0.0.1:0"])
        cluster.wait_ready(second, front)
        (first,) = [one for one in cluster.services if one.service == role and one is not second]
        assert first.address != second.address

        async def scenario() -> None:
            async with TandemClient(front.address) as client:
                expected = await client.complete("abc", **OPTIONS)
                generation = client.generate("abc", **OPTIONS)
                num_chunks = 0
                async for _ in generation:
                    num_chunks += 1
                    if num_chunks == 3:
                        first.process.kill()
                        files[role].write_text(second.address)
                assert generation.result.token_ids == expected.token_ids
                await until_connected(client, second.address)
                after = await client.complete("abc", **OPTIONS)
                assert after.token_ids == expected.token_ids
                assert after.speculation.num_fallback_rounds == 0
                assert after.speculation.num_accepted == after.speculation.num_draft_tokens > 100

        asyncio.run(asyncio.wait_for(scenario(), HANG_S))
