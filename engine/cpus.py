"""How many processors this process may really use: what a container grants, not what the machine has."""

import math
import os
from pathlib import Path

import torch

_V2 = "cpu.max"  # "QUOTA PERIOD" in microseconds, or "max PERIOD"
_V1 = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")  # a quota of -1: none


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """At least 1: the processors of the affinity mask, or the cgroup's quota of time rounded up, whichever is less.

    More threads than the quota are stopped together for most of every period: 45 times slower (kserve #1031).
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return cpus if quota is None else max(1, min(cpus, math.ceil(quota)))


def use_threads(threads: int | None) -> None:
    """Compute with so many threads; None: as torch would, within what is available."""
    torch.set_num_threads(threads or min(torch.get_num_threads(), available_cpus()))


def _quota(cgroup: Path) -> float | None:
    """Processors' worth of time; None without a limit, or where it cannot be read."""
    try:
        if (cgroup / _V2).exists():
            quota, period = (cgroup / _V2).read_text().split()
        else:
            quota, period = ((cgroup / name).read_text().strip() for name in _V1)
        if quota in ("max", "-1"):
            return None
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
