"""The command-line options by which a model service chooses its engine."""

import argparse
import re

from engine.backends.settings import DEFAULT_KV_MEMORY_BYTES, EngineSettings
from tandem.serving.options import positive_int

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(text: str) -> int:
    """ "512M", "2G" or a plain number -> bytes; ArgumentTypeError otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 512M or 2G")
    num_bytes = int(float(match[1]) * _UNITS[match[2].upper()])
    if num_bytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1 byte")
    return num_bytes


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --model, --backend, --dtype and the sizes of an engine."""
    defaults = EngineSettings()
    group = parser.add_argument_group("model")
    group.add_argument("--model", default=defaults.model, help="a pulled name, a model directory or a .gguf file")
    group.add_argument(
        "--backend",
        default=defaults.backend,
        help="torch, transformers for models that torch does not know, or toy for an in-memory double",
    )
    group.add_argument("--dtype", default=defaults.dtype, help="float32 or bfloat16")
    group.add_argument(
        "--kv-memory",
        type=parse_bytes,
        metavar="BYTES",
        help=f"key-value memory, e.g. 64M or 2G; not with --toy; default: {DEFAULT_KV_MEMORY_BYTES >> 20}M",
    )
    group.add_argument(
        "--block-size", type=positive_int, default=defaults.block_size, metavar="N", help="tokens a block"
    )
    group.add_argument(
        "--max-context",
        type=positive_int,
        metavar="N",
        help="most tokens of a sequence; default: the model's limit",
    )
    group.add_argument("--threads", type=positive_int, metavar="N", help="compute threads; default: all cores")
    group.add_argument(
        "--max-step-tokens",
        type=positive_int,
        default=defaults.max_step_tokens,
        metavar="N",
        help="most tokens of one forward",
    )
    group.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=defaults.prefix_cache,
        help="keep key-value rows for later requests that begin with the same tokens",
    )
    group.add_argument("--toy", help="a toy engine instead of a model, e.g. hashed:vocab=512,seed=3,blocks=300")


def engine_settings(args: argparse.Namespace) -> EngineSettings:
    """The settings the options stand for; `--toy` alone chooses the toy backend."""
    return EngineSettings(
        model=args.model,
        backend="toy" if args.toy else args.backend,
        dtype=args.dtype,
        kv_memory_bytes=args.kv_memory,
        block_size=args.block_size,
        max_context=args.max_context,
        threads=args.threads,
        max_step_tokens=args.max_step_tokens,
        prefix_cache=args.prefix_cache,
        toy=args.toy,
    )
