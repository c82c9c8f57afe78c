"""What the processes of a system hold, looked at again and again."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from loadtest.memory import Allocated, allocated, own_bytes, resident_bytes
from tandem.client import ServerInfo, SyncTandemClient, TandemError
from tandem.processes import LocalCluster


@dataclass(frozen=True, slots=True)
class Sample:
    """One look."""

    at_s: float  # Unix
    resident: Mapping[str, int]  # bytes, by service
    own: Mapping[str, int]  # of them, those that are no file's
    allocated: Mapping[str, Allocated]  # by service; without those that did not answer in time
    counters: Mapping[str, int] | None  # None: the orchestrator did not answer in time

    @property
    def is_idle(self) -> bool:
        """Whether nobody held anything."""
        return self.counters is not None and not any(self.counters.values())


def resident_bytes_of(sample: Sample) -> Mapping[str, int]:
    """By service; pages of files included."""
    return sample.resident


def own_bytes_of(sample: Sample) -> Mapping[str, int]:
    """By service, resident and no file's."""
    return sample.own


def malloc_bytes_of(sample: Sample) -> Mapping[str, int]:
    """By service, where known: what malloc has given out."""
    return {service: one.malloc_bytes for service, one in sample.allocated.items()}


def python_blocks_of(sample: Sample) -> Mapping[str, int]:
    """By service, where known."""
    return {service: one.python_blocks for service, one in sample.allocated.items()}


def counters_of(info: ServerInfo) -> dict[str, int]:
    """What must be 0 when nobody asks for anything."""
    return {
        "running requests": info.num_running_requests,
        "sessions at the target": info.target_load.running,
        "sessions at the draft": info.draft_load.running,
        "used blocks at the target": info.target_load.used_blocks,
        "used blocks at the draft": info.draft_load.used_blocks,
    }


@dataclass
class Monitor:
    """Of one system; `deaths` names the services that ended by themselves."""

    cluster: LocalCluster
    client: SyncTandemClient
    metrics_addresses: Mapping[str, str]  # by service
    samples: list[Sample] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)

    def look(self) -> None:
        """Take a sample, unless a service has ended."""
        dead = [one for one in self.cluster.services if one.process.poll() is not None]
        self.deaths = [f"the {one.service} service, with exit code {one.process.returncode}" for one in dead]
        if dead:
            return
        pids = {one.service: one.process.pid for one in self.cluster.services}
        resident = {service: resident_bytes(pid) for service, pid in pids.items()}
        own = {service: own_bytes(pid) for service, pid in pids.items()}
        taken = {service: allocated(address) for service, address in self.metrics_addresses.items()}
        try:
            counters = counters_of(self.client.info(timeout=5.0))
        except TandemError:  # a busy machine; the next look is soon
            counters = None
        known = {service: one for service, one in taken.items() if one is not None}
        self.samples.append(Sample(time.time(), resident, own, known, counters))
