"""What users configure about an engine; free of torch, so that options can be read before it is loaded."""

from dataclasses import dataclass

from tandem.defaults import MAX_STEP_TOKENS

DEFAULT_KV_MEMORY_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Which engine to run, and with how much memory."""

    model: str = "smollm2-135m"  # a pulled model's name, a model directory or a .gguf file
    backend: str = "torch"
    dtype: str = "float32"
    kv_memory_bytes: int | None = None  # None: DEFAULT_KV_MEMORY_BYTES; a toy engine has no bytes to give
    block_size: int = 16  # tokens a block
    max_context: int | None = None  # tokens; None: the model's own limit
    threads: int | None = None  # compute threads; None: torch's choice
    max_step_tokens: int = MAX_STEP_TOKENS  # most tokens of one forward
    prefix_cache: bool = True  # keep rows of ended sequences for others that begin with the same tokens
    toy: str | None = None  # the toy backend's logits and speed, see toy_options.py
