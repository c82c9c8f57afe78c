"""Pieces of a benchmark's markdown report: the machine, spreads, tables."""

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch


def machine_lines() -> list[str]:
    """What the figures depend on: processor, cores, threads, torch, how waiting threads wait."""
    policy = os.environ.get("OMP_WAIT_POLICY", "default")
    spin = os.environ.get("GOMP_SPINCOUNT", "default")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return [
        f"Machine: {cpu_name()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}; "
        f"{torch.get_num_threads()} threads; torch {torch.__version__}.",
        f"OMP_WAIT_POLICY {policy}, GOMP_SPINCOUNT {spin}; load average at the end {load} (this run included).",
    ]


def quartiles(values: Sequence[float], decimals: int = 2) -> str:
    """Median (first to third quartile)."""
    if len(values) < 2:
        return f"{values[0]:.{decimals}f}"
    low, middle, high = (f"{value:.{decimals}f}" for value in statistics.quantiles(values, n=4, method="inclusive"))
    return f"{middle} ({low}–{high})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A markdown table's lines."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def cpu_name() -> str:
    """The processor's model name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
