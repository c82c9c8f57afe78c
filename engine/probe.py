"""What `tandem doctor` asks of torch, in a process of its own: `python -m engine.probe` writes one JSON object.

tandem/doctor/torch_facts.py reads it.
"""

import json
import sys

import torch

from engine.backends.settings import DEFAULT_KV_MEMORY_BYTES
from engine.cpus import use_threads

if __name__ == "__main__":
    use_threads(None)
    facts = {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kv_memory_bytes": DEFAULT_KV_MEMORY_BYTES,
    }
    sys.stdout.write(json.dumps(facts) + "\n")
