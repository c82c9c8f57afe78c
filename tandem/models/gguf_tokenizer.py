"""Convert the tokenizer inside a GGUF file to `tokenizer.json` and `tokenizer_config.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandem.models.gguf_header import GgufFileError, read_gguf_header

_CONTROL_TOKEN = 3  # GGUF's token type of special tokens


def convert_gguf_tokenizer(gguf_path: Path, directory: Path) -> None:
    """Write both tokenizer files into `directory`.

    Raises `GgufFileError` for a tokenizer other than a byte-level BPE with the `smollm` pre-tokenizer.
    """
    metadata = read_gguf_header(gguf_path).metadata
    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise GgufFileError(f"{gguf_path}: its tokenizer is {kind}; only ('gpt2', 'smollm') can be converted")
    tokenizer = _build_tokenizer(metadata)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = json.dumps(_tokenizer_config(metadata), ensure_ascii=False, indent=2)
    (directory / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")


def _build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # The model was trained with each digit split off before the byte-level words, so "\n\n1" is two tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    return {
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }
