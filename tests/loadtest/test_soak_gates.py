"""What a soak must have shown: each gate can fail, and says why."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.churn.calls import Ending
from loadtest.figures import Figures
from loadtest.memory import Allocated
from loadtest.schedule import soak_schedule
from loadtest.soak.gates import (
    ALLOCATOR_BYTES,
    CANCELLED_STREAM_BYTES,
    MALLOC_BYTES,
    PYTHON_BLOCKS,
    SystemRun,
    all_gates,
    cut_short_bytes,
    gates,
)
from loadtest.soak.monitor import Sample, counters_of
from loadtest.soak.report import page, write
from tandem.client import ServerInfo

CYCLE_S = 300.0
START = 1_000_000.0
MIB = 1 << 20
NOBODY = ServerInfo(0, ())


def samples(busy: int = 5, quiet: int = 0, num_cycles: int = 4) -> list[Sample]:
    """Every 5 s; a warm-up in which memory grows a lot, counters that are `quiet` in the quiet phases."""
    schedule = soak_schedule(10, num_cycles, CYCLE_S)
    taken = []
    for second in range(0, int(schedule.seconds), 5):
        is_quiet = any(begin + 10 <= second <= end for begin, end in schedule.quiet_times())
        size = 100 * MIB + int(min(second, CYCLE_S)) * MIB
        taken.append(
            Sample(
                START + second,
                {"target": 2 * second * MIB},
                {"target": size},
                {"target": Allocated(size // 2, size // 1000)},
                dict.fromkeys(counters_of(NOBODY), quiet if is_quiet else busy),
            )
        )
    return taken


def figures(**counts: int) -> Figures:
    """A run in which everything happened, and `counts` with underscores for spaces."""
    seen = Figures()
    for name in ("begun", "calls", Ending.FINISHED.value, "cancelled", "deadline passed", "accepted drafts"):
        seen.count(name, START, 3)
    for name, number in counts.items():
        seen.count(name.replace("_", " "), START, number)
    return seen


def whole_run() -> SystemRun:
    return SystemRun(
        "toy", figures(), samples(), [], [], soak_schedule(10, 4, CYCLE_S), START, START + 4 * CYCLE_S, CYCLE_S
    )


def failed(run: SystemRun) -> list[str]:
    return [gate.name for _, gate in all_gates([run]) if gate.passed is False]


def test_a_run_with_nothing_to_complain_about_passes_every_gate() -> None:
    assert [gate.passed for _, gate in all_gates([whole_run()])] == [True] * 12
    assert "Verdict: **passed**." in page([whole_run()], ["toy: what ran"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"figures": figures(wrong_answers=1)}, "not the recorded ones"),
        ({"figures": figures(failures=1)}, "failures"),
        ({"figures": figures(begun=1)}, "in no figure of how calls end"),
        ({"deaths": ["the target service, with exit code -9"]}, "ended by themselves"),
        ({"held": ["target at h:1: 1 sessions"]}, "held at the end"),
        ({"ended_at": START + CYCLE_S}, "followed its schedule"),
        ({"samples": samples(quiet=1)}, "quiet phases"),
        ({"samples": [replace(one, counters=None) for one in samples()]}, "quiet phases"),
    ],
)
def test_each_fault_fails_one_gate_and_the_page_says_so(change: Mapping[str, object], words: str) -> None:
    run = replace(whole_run(), **change)  # type: ignore[arg-type]
    (name,) = failed(run)
    assert words in name
    assert "Verdict: **NOT passed**." in page([run], [])


def test_the_report_has_its_plots_beside_it_and_none_of_what_never_happened(tmp_path: Path) -> None:
    run = whole_run()
    write(tmp_path / "soak.md", [run], [])
    assert not (tmp_path / "soak_latency.svg").exists()
    run.figures.add_latency("first token", START, 0.1)
    write(tmp_path / "soak.md", [run], [])
    files = sorted(file.name for file in tmp_path.glob("*.svg"))
    assert files == [
        f"soak_{name}.svg" for name in ("blocks", "latency", "malloc", "requests", "resident", "sessions")
    ]
    text = (tmp_path / "soak.md").read_text()
    assert all(f"]({file})" in text for file in files)


def test_refusals_that_say_when_to_come_back_are_wanted() -> None:
    assert failed(replace(whole_run(), figures=figures(begun=100, refusals=100))) == []


@pytest.mark.parametrize("missing", [Ending.FINISHED.value, "cancelled", "deadline passed", "accepted drafts"])
def test_a_run_that_lacks_a_kind_of_call_shows_nothing(missing: str) -> None:
    seen = figures()
    seen.counts = type(seen.counts)({key: number for key, number in seen.counts.items() if key[0] != missing})
    (name,) = failed(replace(whole_run(), figures=seen))
    assert "must have happened" in name


def test_cancels_and_deadlines_of_one_system_show_them_for_all() -> None:
    seen = figures()
    seen.counts = type(seen.counts)({key: number for key, number in seen.counts.items() if key[0] != "cancelled"})
    name, gate = all_gates([whole_run(), replace(whole_run(), figures=seen)])[-1]
    assert name == "together"
    assert gate.passed
    assert "cancelled: 3" in gate.seen


def test_one_quiet_phase_in_which_something_stays_is_enough_to_fail() -> None:
    begin, end = whole_run().schedule.quiet_times()[1]
    held = [
        replace(one, counters={"sessions at the target": 1}) if begin <= one.at_s - START <= end else one
        for one in samples()
    ]
    run = replace(whole_run(), samples=held)
    (gate,) = [gate for gate in gates(run) if gate.passed is False]
    assert gate.seen == "3 of 4"


def with_memory(
    own: Callable[[float], float] = lambda second: 0,
    malloc: Callable[[float], float] = lambda second: 0,
    blocks: Callable[[float], float] = lambda second: 0,
) -> SystemRun:
    """A run whose target process has so much of each, besides the usual, at each second of it."""

    def changed(one: Sample) -> Sample:
        second, usual = one.at_s - START, one.allocated["target"]
        held = Allocated(usual.malloc_bytes + int(malloc(second)), usual.python_blocks + int(blocks(second)))
        return replace(one, own={"target": one.own["target"] + int(own(second))}, allocated={"target": held})

    return replace(whole_run(), samples=[changed(one) for one in samples()])


@pytest.mark.parametrize(
    ("what", "limit", "words"),
    [("malloc", MALLOC_BYTES, "what malloc has given"), ("blocks", PYTHON_BLOCKS, "Python blocks")],
)
def test_what_is_held_may_grow_in_the_warm_up_and_not_after_it(what: str, limit: int, words: str) -> None:
    def leaking(times: float) -> SystemRun:
        return with_memory(**{what: lambda second: times * limit * second / (3 * CYCLE_S)})

    assert failed(leaking(0.9)) == []
    (name,) = failed(leaking(1.1))
    assert words in name


def arenas(second: float) -> float:
    """Bytes that threads' arenas keep: more and more in the warm-up, more in a spike."""
    num_arenas = min(8, 1 + second / CYCLE_S * 7)
    in_spike = 0.4 <= second % CYCLE_S / CYCLE_S < 0.5
    return 64 * MIB * num_arenas + 40 * MIB * in_spike


def test_the_plateau_of_allocator_arenas_is_no_leak_and_hides_none() -> None:
    """synalinks PR #102, holon #2931: 2.2 GB resident, 14 MB of them in use."""
    assert failed(with_memory(arenas)) == []
    leak = 1.2 * MALLOC_BYTES / (3 * CYCLE_S)
    (name,) = failed(with_memory(arenas, malloc=lambda second: leak * second))
    assert "what malloc has given" in name


def test_memory_that_no_allocator_counts_may_not_pass_its_level_in_the_warm_up() -> None:
    def grown(by: float) -> SystemRun:
        return with_memory(lambda second: by * (second > 2 * CYCLE_S))

    assert failed(grown(0.9 * ALLOCATOR_BYTES)) == []
    (name,) = failed(grown(1.1 * ALLOCATOR_BYTES))
    assert "own resident memory" in name


def test_figures_that_most_looks_lack_fail_the_run() -> None:
    lacking = [replace(one, allocated={} if index % 3 else one.allocated) for index, one in enumerate(samples())]
    assert failed(replace(whole_run(), samples=lacking)) == [
        "growth of what malloc has given to the target process",
        "growth of the target process's Python blocks",
    ]


def test_streams_that_were_cut_short_may_cost_what_grpc_keeps_of_them() -> None:
    run = replace(whole_run(), figures=figures(left=39_994))
    assert run.num_cut_short == 40_000
    assert cut_short_bytes(run) == 0.75 * 40_000 * CANCELLED_STREAM_BYTES


def test_a_run_too_short_for_a_trend_says_so_and_does_not_judge_memory() -> None:
    run = replace(whole_run(), schedule=soak_schedule(10, 1, CYCLE_S), samples=samples(num_cycles=1))
    *_, gate = gates(run)
    assert gate.passed is None
    assert "0 s after the warm-up, a trend needs 600 s" in gate.seen
    assert failed(run) == []
