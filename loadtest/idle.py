"""Whether the services hold anything once every request has ended."""

import time

from tandem.client import ServerInfo, SyncTandemClient
from tandem.types import Load

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
    if not info.is_target_connected:
        held.append("target: not connected, what it holds is not known")
    if info.draft is not None and not info.is_draft_connected:
        held.append("draft: not connected, what it holds is not known")
    loads = {"target": info.target_load, "draft": info.draft_load}
    return [*held, *(_describe(name, load) for name, load in loads.items() if load is not None and _is_busy(load))]


def _is_busy(load: Load) -> bool:
    return bool(load.running or load.waiting or load.used_blocks)


def _describe(name: str, load: Load) -> str:
    return f"{name}: {load.running} sessions, {load.waiting} waiting, {load.used_blocks} used blocks"
