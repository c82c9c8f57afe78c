"""Faults that were reported of other systems' transport, load and deployment, each as its own small scenario."""

import asyncio
import os
from typing import Any

import grpc
import pytest

from orchestrator.server import OrchestratorSettings
from orchestrator.target_session import TargetPatience
from tandem.client import InvalidRequestError, TandemClient
from tandem.client_request import build_request
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.serving.channels import channel_options, open_channel, server_options
from tests.hidden import Reader, rows_in, rows_of
from tests.orchestrator.fakes import until
from tests.orchestrator.pooled import pooled
from tests.orchestrator.services import (
    all_services,
    self_draft,
    similar_draft,
    toy_engine,
)

GREEDY: dict[str, Any] = {"temperature": 0.0}


def run(scenario: Any, limit_s: float = 60) -> None:
    asyncio.run(asyncio.wait_for(scenario, limit_s))


def test_streams_that_nobody_reads_any_more_and_nobody_cancels_end_by_themselves() -> None:
    """grpc #43462: a dropped call is never collected, so no cancel is sent."""

    async def scenario() -> None:
        async with all_services(similar_draft) as stack, open_channel(stack.client.address) as channel:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            dropped = []
            for number in range(100):
                call: Any = stub.Generate(build_request("abc", max_tokens=40, ignore_eos=True, seed=number))
                await call.read()
                dropped.append(call)  # held, as the leak holds it
            await stack.until_free()
            del dropped

    run(scenario())


def test_an_answer_outlives_a_draft_service_that_fails_inside_while_the_client_waits_without_a_deadline() -> None:
    """grpc #29248: an inner cancellation left the client without a status for ever."""

    class Failing:
        """Drafts once, then raises whatever it may be."""

        def __init__(self, error: BaseException) -> None:
            self.inner, self.error, self.num_proposed = self_draft(), error, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def propose(self, batch: Any) -> Any:
            self.num_proposed += 1
            if self.num_proposed > 1:
                raise self.error
            return self.inner.propose(batch)

    async def scenario(error: BaseException) -> None:
        async with all_services(lambda: Failing(error)) as stack:  # type: ignore[arg-type, return-value]
            result = await stack.client.complete("abc", max_tokens=20, ignore_eos=True, **GREEDY)
            assert result.num_completion_tokens == 20
            assert result.speculation.num_fallback_rounds > 0

    for error in (RuntimeError("broken"), asyncio.CancelledError(), KeyError("x")):
        run(scenario(error))


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"top_p": 1.5}, "INVALID_ARGUMENT"),
        ({"max_tokens": 10**6}, "INVALID_ARGUMENT"),
        ({"prompt": [1] * 300}, "INVALID_ARGUMENT"),
    ],
)
def test_a_refusal_is_a_status_and_no_chunk_comes_with_it(options: dict[str, Any], code: str) -> None:
    """grpc #30306: errors in the stream, with status OK."""

    async def scenario() -> None:
        async with all_services(None) as stack:
            prompt = options.pop("prompt", "abc")
            generation = stack.client.generate(prompt, **options)
            with pytest.raises(InvalidRequestError) as caught:
                await anext(aiter(generation))
            assert caught.value.code == code
            assert generation.answers == ()

    run(scenario())


def test_both_ends_agree_on_sizes_and_pings() -> None:
    """elasticdl #571, llm-d-kv-cache #359: 4 MiB by default, and GOAWAY for pings that the server does not allow."""
    client, server = dict(channel_options(1 << 25)), dict(server_options(1 << 25))
    assert client["grpc.max_receive_message_length"] == server["grpc.max_send_message_length"] == 1 << 25
    assert client["grpc.max_send_message_length"] == server["grpc.max_receive_message_length"] == 1 << 25
    assert client["grpc.keepalive_time_ms"] > server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_permit_without_calls"] == server["grpc.keepalive_permit_without_calls"] == 1
    assert client["grpc.http2.max_pings_without_data"] == 0


def test_a_proxy_in_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """grpc #11896: http_proxy takes even localhost."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)

    async def scenario() -> None:
        async with all_services(self_draft) as stack, TandemClient(stack.client.address) as client:
            result = await client.complete("abc", max_tokens=4, ignore_eos=True)
            assert result.speculation.num_draft_tokens > 0

    run(scenario())
    assert os.environ["http_proxy"] == "http://127.0.0.1:1"


def test_a_target_that_comes_back_elsewhere_is_found_by_those_who_wait() -> None:
    """grpc #8296: after a peer restarts at a new address the first calls fail, or all do."""

    async def scenario() -> None:
        settings = OrchestratorSettings(draft_timeout_s=5.0, target_patience=TargetPatience(reconnect_s=30.0))
        async with pooled(1, 1, settings=settings, make_engine=lambda: toy_engine(step_delay_s=0.002)) as cluster:
            options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, **GREEDY}
            expected = await cluster.client.complete("abc", **options)
            generation = cluster.client.generate("abc", **options)
            count = 0
            async for _ in generation:
                count += 1
                if count == 3:
                    (target,) = cluster.targets
                    await target.stop()
                    target.address, target.engine = "127.0.0.1:0", toy_engine()
                    await target.start()
                    cluster.named["target"][:] = [target.address]
            assert generation.result.token_ids == expected.token_ids

    run(scenario())


def test_a_draft_service_at_another_address_has_every_row_before_its_first_draft() -> None:
    """sglang #10059, PR #31513: after a re-attachment the head was given hidden states of another shape."""
    readers: list[Reader] = []

    def make() -> Reader:
        readers.append(Reader(self_draft()))
        return readers[-1]

    async def scenario() -> None:
        engine = toy_engine(step_delay_s=0.005)
        settings = OrchestratorSettings(draft_timeout_s=60.0)
        async with pooled(1, 1, make_engine=lambda: engine, make_proposer=make, settings=settings) as cluster:
            options: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "num_draft_tokens": 3, **GREEDY}
            expected = await cluster.client.complete("abc", **options, speculation=False)
            answer = asyncio.create_task(cluster.client.complete("abc", **options))
            await until(lambda: len(readers[0].batches) > 3)
            engine.step_delay_s = 0.2  # so that the answer does not end before the new one can have drafted
            (draft,) = cluster.drafts
            await draft.stop()
            draft.address = "127.0.0.1:0"
            await draft.start()
            cluster.named["draft"][:] = [draft.address]
            await until(lambda: len(readers) == 2 and len(readers[1].batches) > 1)
            engine.step_delay_s = 0.0
            result = await answer
        assert result.token_ids == expected.token_ids
        assert result.speculation.num_accepted == result.speculation.num_draft_tokens
        (first,) = readers[1].batches[0]
        right = rows_of(first.committed_token_ids[:-1])
        assert len(right) > 3  # it came in the middle
        assert rows_in(first.hidden_states) == right

    run(scenario())


def test_the_second_server_on_a_port_does_not_start() -> None:
    """grpc #16920: both listen, and calls are split."""

    async def scenario() -> None:
        async with all_services(None) as stack:
            second = grpc.aio.server(options=server_options(1 << 20))
            with pytest.raises(RuntimeError):
                second.add_insecure_port(stack.target.address)

    run(scenario())
