"""Whether the services hold anything once every request has ended."""

import time

from tandem.client import ReplicaInfo, ServerInfo, SyncTandemClient

IDLE_WITHIN_S = 10.0
_POLL_S = 0.1


def wait_idle(client: SyncTandemClient, within_s: float = IDLE_WITHIN_S) -> list[str]:
    """Wait until nothing is in use, as the last end may take a moment to be heard; what still is after `within_s`."""
    deadline = time.monotonic() + within_s
    while held := in_use(client.info()):
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    return held


def in_use(info: ServerInfo) -> list[str]:
    """What is held, a line a service; empty when idle. Cached blocks belong to nobody and do not count."""
    held = [f"orchestrator: {info.num_running_requests} running requests"] if info.num_running_requests else []
    return [*held, *filter(None, map(_held_by, info.replicas))]


def _held_by(replica: ReplicaInfo) -> str:
    """What a replica holds; empty when nothing."""
    name, load = f"{replica.role} at {replica.address}", replica.load
    if not replica.is_connected:
        return f"{name}: not connected, what it holds is not known"
    if not (load.running or load.waiting or load.used_blocks):
        return ""
    return f"{name}: {load.running} sessions, {load.waiting} waiting, {load.used_blocks} used blocks"
