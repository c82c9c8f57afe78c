"""What both model services export of their load."""

from collections.abc import Callable

from tandem.serving.metrics import SECONDS, WIDTHS, Histogram, Metrics, Numbers
from tandem.types import Load


def add_load_metrics(metrics: Metrics, load: Callable[[], Load]) -> None:
    """`load`: asked when the metrics are read. Figures of key-value memory have no value where there is none."""
    metrics.gauge("tandem_requests_running", "Requests that have their place.", lambda: load().running)
    metrics.gauge("tandem_requests_waiting", "Requests and rounds that wait.", lambda: load().waiting)
    metrics.gauges("tandem_kv_usage_ratio", "Share of the key-value blocks in use.", (), lambda: _kv_usage(load()))
    metrics.gauges("tandem_kv_blocks", "Key-value blocks, by state.", ("state",), lambda: _blocks(load()))
    metrics.read_counter("tandem_stale_items_total", "Items dropped as stale.", lambda: load().stale_items)
    metrics.read_counter(
        "tandem_shrunk_draft_tokens_total",
        "Draft tokens given up for lack of memory.",
        lambda: load().shrunk_draft_tokens,
    )
    metrics.read_counter(
        "tandem_evicted_sessions_total",
        "Sessions freed because nobody asked any more.",
        lambda: load().evicted_sessions,
    )
    metrics.read_counter(
        "tandem_kv_evicted_blocks_total", "Cached blocks given to others.", lambda: load().evicted_blocks
    )
    metrics.read_counter(
        "tandem_kv_hit_blocks_total", "Blocks found in the prefix cache.", lambda: load().hit_blocks
    )


class StepMetrics:
    """One compute call after the other."""

    def __init__(self, metrics: Metrics) -> None:
        self._seconds = metrics.histogram("tandem_step_seconds", "Time of one step: one compute call.", SECONDS)
        self._requests: Histogram = metrics.histogram("tandem_step_requests", "Requests in one step.", WIDTHS)

    def count(self, num_requests: int, time_s: float) -> None:
        """One step."""
        self._requests.observe(num_requests)
        self._seconds.observe(time_s)


def _kv_usage(load: Load) -> Numbers:
    return [((), load.kv_usage)] if load.total_blocks else []


def _blocks(load: Load) -> Numbers:
    if not load.total_blocks:
        return []
    num_free = load.total_blocks - load.used_blocks - load.cached_blocks
    return [(("used",), load.used_blocks), (("cached",), load.cached_blocks), (("free",), num_free)]
