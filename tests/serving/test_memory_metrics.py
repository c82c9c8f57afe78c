"""What is held is counted when it is taken and when it is freed, which resident memory does not tell."""

import ctypes

import pytest

from tandem.serving import memory_metrics
from tandem.serving.memory_metrics import add_memory_metrics
from tandem.serving.metrics import Metrics
from tests.scraped import Scraped

MIB = 1 << 20


def scraped() -> Scraped:
    metrics = Metrics("target")
    add_memory_metrics(metrics)
    return Scraped.of(metrics)


@pytest.mark.skipif(memory_metrics.malloc_meter() is None, reason="no glibc that counts")
@pytest.mark.parametrize("piece", [100_000, 64 * MIB])
def test_bytes_given_out_are_counted_in_heaps_and_in_mappings_and_freed_ones_are_not(piece: int) -> None:
    name = "tandem_malloc_bytes"
    before = scraped()[name]
    held = [bytearray(piece) for _ in range(64 * MIB // piece)]
    during = scraped()[name]
    held.clear()
    after = scraped()[name]
    assert 63 * MIB < during - before < 80 * MIB
    assert 63 * MIB < during - after < 80 * MIB


def test_objects_are_counted_while_there_are_any() -> None:
    name = "tandem_python_blocks"
    before = scraped()[name]
    held = [object() for _ in range(200_000)]
    during = scraped()[name]
    held.clear()
    assert during - before > 190_000
    assert during - scraped()[name] > 190_000


def test_without_a_c_library_that_counts_there_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert "tandem_malloc_bytes" not in scraped().names
    assert scraped()["tandem_python_blocks"] > 0
