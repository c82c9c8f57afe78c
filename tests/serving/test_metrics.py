"""Counters, histograms and gauges as a scraper reads them, and the page they are read from."""

import asyncio
import ssl
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tandem.serving.channels import AddressError
from tandem.serving.life import PortInUseError, ServerSettings
from tandem.serving.load_metrics import add_load_metrics
from tandem.serving.metrics import Metrics
from tandem.serving.metrics_server import serving_metrics
from tandem.serving.server_tls import ServerTls
from tandem.serving.speculation_metrics import VerdictCounts
from tandem.types import Load
from tests.certificates import Authority
from tests.scraped import Scraped

ADDRESS = "127.0.0.1:0"


def at(address: str | None, *, insecure: bool = False) -> ServerSettings:
    """Of a server in clear text, with its figures there."""
    return ServerSettings("x", "127.0.0.1:0", 1024, insecure=insecure, metrics_address=address)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


async def ask(address: str, request: str) -> tuple[str, str]:
    """The head and the body of what is answered."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request.encode())
    answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return head, body


def test_what_is_counted_is_what_is_read_with_the_component_that_counted_it() -> None:
    metrics = Metrics("draft")
    metrics.counter("a_total", "Of a.").add(3)
    by_kind = metrics.counters("b_total", "Of b.", "kind", ["x"])
    by_kind["y"].add(0.5)
    metrics.gauges("c", "Of c.", ("m", "n"), lambda: [(("1", "2"), 7)])
    scraped = Scraped.of(metrics)
    assert scraped["a_total"] == 3
    assert (scraped.value("b_total", kind="x"), scraped.value("b_total", kind="y")) == (0, 0.5)
    assert scraped.value("c", m="1", n="2") == 7
    assert {sample.labels["component"] for sample in scraped.samples} == {"draft"}


def test_a_histogram_counts_values_up_to_each_bound_and_several_at_a_time() -> None:
    metrics = Metrics("draft")
    seconds = metrics.histogram("s", "Of s.", (1.0, 2.0))
    seconds.observe(1.0)
    seconds.observe(1.5, 3)
    seconds.observe(9.0)
    scraped = Scraped.of(metrics)
    assert [scraped.value("s_bucket", le=bound) for bound in ("1.0", "2.0", "+Inf")] == [1, 4, 5]
    assert (scraped["s_count"], scraped["s_sum"]) == (5, 14.5)
    assert (seconds.count, seconds.sum) == (5, 14.5)


def test_a_name_is_given_once_and_two_processes_figures_are_apart() -> None:
    one, other = Metrics("draft"), Metrics("draft")
    one.counter("a_total", "Of a.").add()
    assert other.counter("a_total", "Of a.").value == 0
    with pytest.raises(ValueError, match="a_total already"):
        one.counter("a_total", "Again.")


def test_drafts_are_counted_in_all_by_position_and_only_where_there_are_any() -> None:
    metrics = Metrics("target")
    counts = VerdictCounts(metrics)
    for drafted, accepted in ((3, 1), (0, 0), (1, 1), (2, 0)):
        counts.count(drafted, accepted)
    scraped = Scraped.of(metrics)
    names = ("drafts", "draft_tokens", "accepted_tokens")
    assert [scraped[f"tandem_spec_decode_num_{name}_total"] for name in names] == [3, 6, 2]
    assert scraped["tandem_rounds_total"] == 4
    assert scraped.by("tandem_spec_decode_num_draft_tokens_per_pos_total", "position") == {"0": 3, "1": 2, "2": 1}
    assert scraped.by("tandem_spec_decode_num_accepted_tokens_per_pos_total", "position") == {"0": 2}


def test_without_key_value_memory_there_are_no_figures_of_it() -> None:
    loads = [Load(running=2), Load(kv_usage=0.25, used_blocks=2, cached_blocks=5, total_blocks=8)]
    scraped = []
    for load in loads:
        metrics = Metrics("draft")
        add_load_metrics(metrics, lambda load=load: load)  # type: ignore[misc]
        scraped.append(Scraped.of(metrics))
    assert scraped[0]["tandem_requests_running"] == 2
    assert scraped[0].by("tandem_kv_blocks", "state") == {}
    assert "tandem_kv_usage_ratio" not in scraped[0].names
    assert scraped[1]["tandem_kv_usage_ratio"] == 0.25
    assert scraped[1].by("tandem_kv_blocks", "state") == {"used": 2, "cached": 5, "free": 1}


def test_the_page_is_what_a_scraper_reads_in_either_format() -> None:
    async def scenario() -> None:
        metrics = Metrics("target")
        metrics.counter("a_total", "Of a.").add(2)
        async with serving_metrics(metrics, at(ADDRESS)) as address:
            assert address is not None
            head, body = await ask(address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert head.startswith("HTTP/1.1 200 OK")
            assert f"Content-Length: {len(body)}" in head
            (family,) = text_string_to_metric_families(body)
            assert [(one.name, one.labels, one.value) for one in family.samples] == [
                ("a_total", {"component": "target"}, 2)
            ]
            accept = "Accept: application/openmetrics-text; version=1.0.0"
            head, body = await ask(address, f"GET /metrics?x HTTP/1.1\r\n{accept}\r\n\r\n")
            assert "Content-Type: application/openmetrics-text" in head
            assert body.endswith("# EOF\n")
            head, body = await ask(address, "HEAD /metrics HTTP/1.1\r\n\r\n")
            assert head.startswith("HTTP/1.1 200 OK")
            assert body == ""

    run(scenario())


@pytest.mark.parametrize(
    ("request_line", "status"),
    [("GET / HTTP/1.1", "404"), ("POST /metrics HTTP/1.1", "405"), ("\xff", "405")],
)
def test_nothing_else_is_answered(request_line: str, status: str) -> None:
    async def scenario() -> None:
        async with serving_metrics(Metrics("target"), at(ADDRESS)) as address:
            assert address is not None
            head, _ = await ask(address, f"{request_line}\r\n\r\n")
            assert head.split()[1] == status

    run(scenario())


def test_a_request_that_takes_too_long_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.serving.metrics_server._TIMEOUT_S", 0.01)

    async def scenario() -> None:
        async with serving_metrics(Metrics("target"), at(ADDRESS)) as address:
            assert address is not None
            host, port = address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /met")
            assert await reader.read() == b""
            writer.close()

    run(scenario())


def test_a_request_that_never_ends_holds_up_neither_others_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.serving.metrics_server._TIMEOUT_S", 1e6)

    async def scenario() -> None:
        metrics = Metrics("target")
        async with serving_metrics(metrics, at(ADDRESS)) as address:
            assert address is not None
            host, port = address.split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /met")
            head, _ = await ask(address, "GET /metrics HTTP/1.1\r\n\r\n")
            assert head.startswith("HTTP/1.1 200 OK")
            reader, other = await asyncio.open_connection(host, int(port))
            other.write(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 70_000)  # more than a head may have
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))
        for one in (writer, other):
            one.close()

    run(scenario())


def test_the_address_is_held_to_the_rules_of_the_services_own() -> None:
    async def scenario() -> None:
        metrics = Metrics("target")
        async with serving_metrics(metrics, at(None)) as nowhere:
            assert nowhere is None
        with pytest.raises(AddressError, match="pass --insecure"):
            await serving_metrics(metrics, at("0.0.0.0:0")).__aenter__()
        async with serving_metrics(metrics, at("0.0.0.0:0", insecure=True)) as address:
            assert address is not None
        async with serving_metrics(metrics, at(ADDRESS)) as address:
            assert address is not None
            with pytest.raises(PortInUseError, match=f"--metrics-address {address}: cannot be bound"):
                await serving_metrics(metrics, at(address)).__aenter__()

    run(scenario())


def test_the_page_is_the_registrys_text() -> None:
    metrics = Metrics("target")
    metrics.counter("a_total", "Of a.")
    assert b'a_total{component="target"} 0.0' in generate_latest(metrics.registry)


def test_the_page_of_a_service_with_tls_is_in_tls_and_asks_for_a_certificate_where_the_service_does(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")

    async def scrape(client: ssl.SSLContext, client_ca: Path | None) -> str:
        settings = replace(at("0.0.0.0:0"), tls=ServerTls(pair.cert, pair.key, client_ca))
        async with serving_metrics(Metrics("target"), settings) as address:
            assert address is not None
            reader, writer = await asyncio.open_connection("127.0.0.1", int(address.split(":")[1]), ssl=client)
            writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
            try:
                return (await reader.read()).decode()
            except (ssl.SSLError, ConnectionError):
                return "refused"
            finally:
                writer.transport.abort()

    known = ssl.create_default_context(cafile=authority.ca)
    assert "200 OK" in asyncio.run(scrape(known, None))
    assert asyncio.run(scrape(known, authority.ca)) in ("", "refused")
    known.load_cert_chain(pair.cert, pair.key)
    assert "200 OK" in asyncio.run(scrape(known, authority.ca))
    with pytest.raises(AddressError, match="--insecure"):
        replace(at("0.0.0.0:0"), tls=None).check()
