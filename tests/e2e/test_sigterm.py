"""SIGTERM while eight answers are under way, to real processes: in good order, and no token is lost or changed."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.server import SERVICE_NAME
from tandem.client import Generation, TandemClient, UnavailableError
from tandem.processes import ClusterPlan, LocalCluster, ServiceProcess
from tandem.serving.channels import open_channel

TOY = "hashed:vocab=512,seed=3"
TARGET = ["--toy", f"{TOY},delay_ms=10", "--address", "127.0.0.1:0"]
DRAFT = ["--proposer", "draft_model", "--toy", f"{TOY},blend=0.3", "--address", "127.0.0.1:0"]
LONG_GRACE, SHORT_GRACE = "100", "0.3"
HANG_S = 90.0
OPTIONS: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "temperature": 0.8}
SEEDS = range(8)

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """One target, one draft service and an orchestrator that nobody disturbs."""
    with LocalCluster(ClusterPlan(TARGET[:2], DRAFT[:4], ["--toy-vocab", "512"]), quiet=True) as running:
        yield running


@pytest.fixture(scope="module")
def expected(cluster: LocalCluster) -> list[tuple[int, ...]]:
    """The undisturbed answers."""

    async def scenario() -> list[tuple[int, ...]]:
        async with TandemClient(cluster.addresses["orchestrator"]) as client:
            results = await asyncio.gather(*(client.complete("abc", seed=seed, **OPTIONS) for seed in SEEDS))
            return [result.token_ids for result in results]

    return run(scenario())


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, HANG_S))


def front(
    cluster: LocalCluster, targets: Sequence[str] = (), drafts: Sequence[str] = (), grace: str = LONG_GRACE
) -> ServiceProcess:
    """One more orchestrator, over the cluster's replicas and these."""
    links = [
        *("--target", ",".join((cluster.addresses["target"], *targets))),
        *("--draft", ",".join((cluster.addresses["draft"], *drafts))),
    ]
    started = cluster.start(
        "orchestrator", [*links, "--toy-vocab", "512", "--address", "127.0.0.1:0", "--grace", grace]
    )
    cluster.wait_ready(started)
    return started


async def exit_code(*services: ServiceProcess) -> list[int]:
    return list(await asyncio.gather(*(asyncio.to_thread(one.process.wait, HANG_S) for one in services)))


async def streamed(
    generations: Sequence[Generation], event: Callable[[], Awaitable[None]]
) -> list[UnavailableError | None]:
    """All of them to their ends, with the event once each has its third chunk -> what ended each before its end."""
    num_begun, all_begun = 0, asyncio.Event()

    async def read(generation: Generation) -> None:
        nonlocal num_begun
        count = 0
        async for _ in generation:
            count += 1
            if count == 3:
                num_begun += 1
                if num_begun == len(generations):
                    all_begun.set()

    async def strike() -> None:
        await all_begun.wait()
        await event()

    async def cut_off(generation: Generation) -> UnavailableError | None:
        try:
            await read(generation)
        except UnavailableError as error:
            return error
        return None

    _, *errors = await asyncio.gather(strike(), *map(cut_off, generations))
    return errors


async def called_until_refused(client: TandemClient) -> None:
    """Between the word of health and the end of listening there is a moment."""
    while True:
        await client.complete("new", max_tokens=1)


def test_an_orchestrator_ends_once_its_answers_have_and_takes_no_new_ones(
    cluster: LocalCluster, expected: list[tuple[int, ...]]
) -> None:
    leaving = front(cluster)

    async def scenario() -> None:
        async with TandemClient(leaving.address) as client, open_channel(leaving.address) as channel:
            watch: Any = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=SERVICE_NAME)
            )
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING

            async def end() -> None:
                leaving.process.send_signal(signal.SIGTERM)
                assert (await watch.read()).status == NOT_SERVING
                watch.cancel()
                async with TandemClient(leaving.address) as late:
                    for new in (client, late):
                        with pytest.raises(UnavailableError):
                            await called_until_refused(new)
                assert leaving.process.poll() is None
                assert max(len(generation.token_ids) for generation in generations) < OPTIONS["max_tokens"]

            generations = [client.generate("abc", seed=seed, **OPTIONS) for seed in SEEDS]
            assert await streamed(generations, end) == [None] * len(generations)
            assert [generation.result.token_ids for generation in generations] == expected
        assert await exit_code(leaving) == [0]

    run(scenario())


def test_answers_leave_a_target_and_a_draft_service_that_end(
    cluster: LocalCluster, expected: list[tuple[int, ...]]
) -> None:
    leaving = [
        cluster.start("target", [*TARGET, "--grace", LONG_GRACE]),
        cluster.start("draft", [*DRAFT, "--grace", LONG_GRACE]),
    ]
    cluster.wait_ready(*leaving)
    through = front(cluster, [leaving[0].address], [leaving[1].address])

    async def scenario() -> None:
        async with TandemClient(through.address) as client:
            generations = [client.generate("abc", seed=seed, **OPTIONS) for seed in SEEDS]

            async def end() -> None:
                info = await client.info()
                busy = {one.address for one in info.replicas if one.num_sessions}
                assert busy == {
                    *(one.address for one in leaving),
                    cluster.addresses["target"],
                    cluster.addresses["draft"],
                }
                for one in leaving:
                    one.process.send_signal(signal.SIGTERM)
                assert await exit_code(*leaving) == [0, 0]
                assert min(len(generation.token_ids) for generation in generations) < OPTIONS["max_tokens"]

            assert await streamed(generations, end) == [None] * len(generations)
            assert [generation.result.token_ids for generation in generations] == expected
            assert sum(generation.result.speculation.num_reopens for generation in generations) >= 2

    run(scenario())


def test_answers_that_outlast_the_grace_are_cut_off_as_unavailable_and_go_on_elsewhere(
    cluster: LocalCluster, expected: list[tuple[int, ...]]
) -> None:
    leaving = front(cluster, grace=SHORT_GRACE)
    addresses = f"{leaving.address},{cluster.addresses['orchestrator']}"

    async def scenario() -> None:
        async with TandemClient(leaving.address) as plain, TandemClient(addresses, resume=True) as resuming:
            generations = [
                (resuming if seed % 2 else plain).generate("abc", seed=seed, **OPTIONS) for seed in SEEDS
            ]

            async def end() -> None:
                leaving.process.send_signal(signal.SIGTERM)
                assert await exit_code(leaving) == [0]

            errors = await streamed(generations, end)
            for seed, (generation, error) in enumerate(zip(generations, errors, strict=True)):
                if seed % 2:
                    assert error is None
                    assert (generation.result.token_ids, generation.num_resumes) == (expected[seed], 1)
                else:
                    assert "shutting down" in str(error)
                    assert f"the {SHORT_GRACE} s of --grace" in str(error)
                    had = generation.token_ids
                    assert 0 < len(had) < len(expected[seed])
                    assert had == expected[seed][: len(had)]

    run(scenario())
