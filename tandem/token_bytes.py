"""The bytes of every token id, read from a `tokenizer.json`.

Two kinds of tokenizer are understood: byte-level BPE, whose tokens spell bytes in a printable alphabet, and
SentencePiece style, whose tokens are text with U+2581 for a space and `<0xNN>` for single bytes.
"""

import re
from collections.abc import Mapping
from typing import Any

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SENTENCEPIECE_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def read_token_bytes(spec: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The table id -> bytes of a parsed `tokenizer.json`; ids without a token have no bytes.

    Raises `ValueError` naming the decoder when it is neither byte-level nor SentencePiece style.
    """
    decoders = _decoders(spec)
    types = [str(decoder["type"]) for decoder in decoders]
    alphabet = _byte_alphabet()
    by_id: dict[int, bytes] = {}
    for token, token_id in _vocabulary_items(spec["model"]):
        if types == ["ByteLevel"]:
            by_id[token_id] = _byte_level(token, alphabet)
        elif types and set(types) <= _SENTENCEPIECE_DECODERS and not {"Replace", "Metaspace"}.isdisjoint(types):
            by_id[token_id] = _sentencepiece(token, "ByteFallback" in types)
        else:
            raise ValueError(
                f"its decoder is {' + '.join(types) or 'none'}; supported are ByteLevel, and SentencePiece style "
                f"({', '.join(sorted(_SENTENCEPIECE_DECODERS))})"
            )
    for added in spec.get("added_tokens", []):
        by_id[int(added["id"])] = str(added["content"]).encode()
    return tuple(by_id.get(token_id, b"") for token_id in range(max(by_id, default=-1) + 1))


def strips_leading_space(spec: Mapping[str, Any]) -> bool:
    """Whether the tokenizer puts a space before a text's first word which decoding takes away again."""
    for decoder in _decoders(spec):
        if decoder["type"] == "Strip" and decoder["content"] == " " and decoder["start"] > 0:
            return True
        if decoder["type"] == "Metaspace":
            default = "always" if decoder.get("add_prefix_space", True) else "never"
            return bool(decoder.get("prepend_scheme", default) != "never")
    return False


def _decoders(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    decoder = spec.get("decoder")
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _vocabulary_items(model: Mapping[str, Any]) -> list[tuple[str, int]]:
    vocab = model["vocab"]
    if isinstance(vocab, Mapping):  # BPE: token -> id
        return [(str(token), int(token_id)) for token, token_id in vocab.items()]
    return [(str(entry[0]), token_id) for token_id, entry in enumerate(vocab)]  # Unigram: [token, score] by id


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _byte_level(token: str, alphabet: Mapping[str, int]) -> bytes:
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()  # a token from outside the alphabet stands for its own text


def _sentencepiece(token: str, has_byte_tokens: bool) -> bytes:
    byte_token = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
    return bytes([int(byte_token[1], 16)]) if byte_token else token.replace(_SPACE_MARK, " ").encode()
