"""What torch says of itself, asked in a process of its own: nothing in `tandem` imports it."""

import json
import subprocess
import sys
from dataclasses import dataclass

_COMMAND = (sys.executable, "-m", "engine.probe")
_TIMEOUT_S = 60.0


class TorchProbeError(Exception):
    """Torch could not be asked; the message says why."""


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """engine/probe.py writes them."""

    version: str
    threads: int  # that a model service would compute with
    cpu_capability: str  # DEFAULT, AVX2, AVX512
    kv_memory_bytes: int  # of an engine unless told otherwise


def ask_torch(command: tuple[str, ...] = _COMMAND) -> TorchFacts:
    """TorchProbeError when it cannot be loaded."""
    try:
        asked = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise TorchProbeError(f"loading it took more than {_TIMEOUT_S:g} s") from error
    if asked.returncode != 0:
        lines = asked.stderr.strip().splitlines()
        raise TorchProbeError(lines[-1] if lines else f"loading it ended with exit code {asked.returncode}")
    return TorchFacts(**json.loads(asked.stdout))
