"""Threads follow what a container grants."""

import os
from pathlib import Path

import pytest

from engine import cpus
from engine.cpus import available_cpus


@pytest.fixture(autouse=True)
def _eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000", 8),
        ("100000 100000", 1),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("1600000 100000", 8),
        ("", 8),
        ("100000 0", 8),
        ("many 100000", 8),
    ],
)
def test_a_quota_of_time_limits_them(tmp_path: Path, text: str, expected: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert available_cpus(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("300000", 3)])
def test_an_old_kernels_quota_does_too(tmp_path: Path, quota: str, expected: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert available_cpus(tmp_path) == expected


def test_without_a_cgroup_there_is_no_limit(tmp_path: Path) -> None:
    assert cpus.available_cpus(tmp_path / "nowhere") == 8
