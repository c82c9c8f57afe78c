"""What processes take in memory, and what a target process of the native engine should: weights, pool, and the rest."""

import urllib.request
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from engine.backends.torch_loading import DTYPES
from engine.models.config import LoadedModel

# Interpreter, libraries, tokenizer, and the buffers of a step, on torch's CPU build.
PROCESS_BYTES = 560 << 20
TOLERANCE = 0.15  # of the sum, to both sides
_MIB = 1 << 20
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes a target process needs once its whole pool has been used."""

    weights: int  # as the engine holds them: the embedding for look-ups, and the output head packed
    kv_per_token: int
    pool: int

    @property
    def total(self) -> int:
        return self.weights + self.pool + PROCESS_BYTES


@dataclass(frozen=True, slots=True)
class MemorySeen:
    """Resident bytes of a target process, and what they should be."""

    plan: MemoryPlan
    before: int  # ready, and nothing asked of it yet
    most: int  # under load
    after: int  # the load
    peak: int  # while loading, or later

    @property
    def problems(self) -> list[str]:
        """What is not within TOLERANCE of the plan; empty when it is as it should be."""
        total = self.plan.total
        return [
            f"resident memory {name} the load: {num_bytes / _MIB:.0f} MiB, {num_bytes / total - 1:+.1%} against the "
            f"{total / _MIB:.0f} MiB of weights, pool and process; {TOLERANCE:.0%} is the limit"
            for name, num_bytes in {"under": self.most, "after": self.after}.items()
            if abs(num_bytes / total - 1) > TOLERANCE
        ]


def plan_memory(model: LoadedModel, dtype: str, num_blocks: int, block_size: int) -> MemoryPlan:
    """For an engine of `dtype` with `num_blocks` blocks of `block_size` tokens."""
    element_bytes = DTYPES[dtype].itemsize
    num_weights = sum(weight.numel() for weight in model.weights.values())
    if model.config.tie_word_embeddings:
        num_weights += model.weights[_EMBEDDING].numel()
    kv_per_token = model.config.kv_bytes_per_token(element_bytes)
    return MemoryPlan(num_weights * element_bytes, kv_per_token, num_blocks * block_size * kv_per_token)


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM now, shared libraries included (Linux)."""
    return _status_bytes(pid, "VmRSS")


def own_bytes(pid: int) -> int:
    """Of them those that are no file's: what a leak takes. Pages of files come and go as the kernel needs memory."""
    return _status_bytes(pid, "RssAnon")


def most_resident_bytes(pid: int) -> int:
    """The most that ever was."""
    return _status_bytes(pid, "VmHWM")


def _status_bytes(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ValueError(f"process {pid} has no {field}: it has ended")


@dataclass(frozen=True, slots=True)
class Allocated:
    """What a process has taken from its allocators and not given back yet, as its metrics tell."""

    malloc_bytes: int  # of the C library's, tensors included
    python_blocks: int


def allocated(metrics_address: str, timeout_s: float = 5.0) -> Allocated | None:
    """None when there is no answer in time; ValueError where the C library does not count."""
    try:
        with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=timeout_s) as answer:
            text = answer.read().decode()
    except OSError:
        return None
    samples = {one.name: one.value for family in text_string_to_metric_families(text) for one in family.samples}
    if "tandem_malloc_bytes" not in samples:
        raise ValueError(f"{metrics_address} does not export tandem_malloc_bytes: that takes glibc 2.33 or later")
    return Allocated(int(samples["tandem_malloc_bytes"]), int(samples["tandem_python_blocks"]))
