"""What this machine gives a process: CPUs, its container's quota, memory, instructions. On Linux; elsewhere unknown."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT_BYTES = 1 << 60  # how control groups of version 1 write that there is none


@dataclass(frozen=True, slots=True)
class Machine:
    """None, or nothing, where it cannot be found out."""

    num_cpus: int  # that this process may run on
    cpu_quota: float | None = None  # CPUs' worth of time; None: no quota
    available_bytes: int | None = None  # of memory, for a new process
    cpu_flags: frozenset[str] = frozenset()


def read_machine(root: Path = Path("/"), num_cpus: int | None = None) -> Machine:
    """`root`: where proc and sys are; `num_cpus`: None for what this process may run on."""
    limits = [limit for limit in (_mem_available(root), *_memory_left(root)) if limit is not None]
    return Machine(
        num_cpus if num_cpus is not None else _num_cpus(),
        min(_quotas(root), default=None),
        min(limits, default=None),
        _cpu_flags(root),
    )


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those around it, version 2 and 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = top / path.lstrip("/")
        while folder != top:
            yield folder
            folder = folder.parent
        yield top


def _quotas(root: Path) -> Iterator[float]:
    for folder in _groups(root, "cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.strip().isdecimal() and period.strip().isdecimal():
            yield int(quota) / int(period)


def _memory_left(root: Path) -> Iterator[int]:
    """What each limit leaves: files that are only cached would give way."""
    for folder in _groups(root, "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _text(folder / limit_name).strip(), _text(folder / used_name).strip()
            if limit.isdecimal() and used.isdecimal() and int(limit) < _NO_LIMIT_BYTES:
                cached = _field(_text(folder / "memory.stat"), "inactive_file")
                yield max(0, int(limit) - int(used) + (cached or 0))


def _mem_available(root: Path) -> int | None:
    kilobytes = _field(_text(root / "proc/meminfo"), "MemAvailable:")
    return None if kilobytes is None else kilobytes * 1024


def _field(text: str, name: str) -> int | None:
    """The number behind a name at a line's start."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def _cpu_flags(root: Path) -> frozenset[str]:
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return frozenset()
