"""What processes say of their memory, as the soak reads it."""

import asyncio

import pytest

from loadtest.memory import Allocated, allocated
from loadtest.soak.systems import free_ports
from tandem.serving.life import ServerSettings
from tandem.serving.metrics import Metrics
from tandem.serving.metrics_server import serving_metrics


def read_from(metrics: Metrics) -> Allocated | None:
    """As it is read from a process with these metrics."""

    async def scenario() -> Allocated | None:
        settings = ServerSettings("x", "127.0.0.1:0", 1024, metrics_address="127.0.0.1:0")
        async with serving_metrics(metrics, settings) as address:
            assert address is not None
            return await asyncio.to_thread(allocated, address)

    return asyncio.run(asyncio.wait_for(scenario(), 30))


def test_it_is_what_the_metrics_say() -> None:
    metrics = Metrics("draft")
    metrics.gauge("tandem_malloc_bytes", "Bytes.", lambda: 3.0 * 2**30)
    metrics.gauge("tandem_python_blocks", "Blocks.", lambda: 5)
    assert read_from(metrics) == Allocated(3 * 2**30, 5)


def test_a_c_library_that_does_not_count_is_named_and_silence_is_no_figure() -> None:
    with pytest.raises(ValueError, match=r"does not export tandem_malloc_bytes: that takes glibc 2\.33"):
        read_from(Metrics("draft"))
    assert allocated(f"127.0.0.1:{free_ports(1)}") is None
