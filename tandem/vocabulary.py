"""A model's vocabulary: text to token ids, and each id's bytes."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tandem.chat_template import ChatTemplate, ChatTemplateError
from tandem.token_bytes import read_token_bytes, strips_leading_space
from tandem.toy_vocabulary import encode_toy, toy_bytes_table

_TOY_CHAT_TEMPLATE = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}assistant: "


class VocabularyError(Exception):
    """Tokenizer files that cannot be used, or text that cannot be encoded; the message names file or character."""


@dataclass(frozen=True)
class Vocabulary:
    """Immutable; safe to share between threads.

    `bytes_table[id]` is the id's bytes; ids of a padded output head lie past its end and have none. The text of
    ids is the UTF-8 decoding of their joined bytes, with U+FFFD for what is not UTF-8.
    """

    bytes_table: tuple[bytes, ...]
    special_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]  # ascending
    bos_token_id: int | None
    add_bos: bool  # the model wants its BOS before a plain text
    strips_leading_space: bool  # the space before a text's first word is not part of the text
    encode_verbatim: Callable[[str], list[int]]  # special-token text becomes special tokens, nothing is added
    chat_template: ChatTemplate | None

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """The vocabulary of a model directory, or of the directory a `.gguf` file lies in.

        Needs `tokenizer.json`; reads `tokenizer_config.json`, `generation_config.json`, `config.json` and
        `chat_template.jinja` where there are any. Raises `VocabularyError` naming the file.
        """
        directory = path.parent if path.is_file() else path
        tokenizer_path = directory / "tokenizer.json"
        spec = _read_json(tokenizer_path)
        if spec is None:
            raise VocabularyError(f"{tokenizer_path} is missing; a model needs its tokenizer as tokenizer.json")
        try:
            tokenizer = Tokenizer.from_str(json.dumps(spec))
            table, strips = read_token_bytes(spec), strips_leading_space(spec)
        except Exception as error:  # the tokenizers package raises nothing more specific
            raise VocabularyError(f"{tokenizer_path} cannot be used: {error}") from error
        config = _read_json(directory / "tokenizer_config.json") or {}
        bos_token, eos_token = _token_text(config, "bos_token"), _token_text(config, "eos_token")
        bos_token_id = tokenizer.token_to_id(bos_token) if bos_token else None
        template = _read_chat_template(directory, config)
        return cls(
            bytes_table=table,
            special_ids=frozenset(int(added["id"]) for added in spec.get("added_tokens", []) if added["special"]),
            eos_token_ids=_read_eos_token_ids(directory, tokenizer.token_to_id(eos_token) if eos_token else None),
            bos_token_id=bos_token_id,
            add_bos=_wants_bos(config, tokenizer, bos_token_id),
            strips_leading_space=strips,
            # A batch of one: unlike `encode`, it lets other threads run meanwhile.
            encode_verbatim=lambda text: list(tokenizer.encode_batch([text], add_special_tokens=False)[0].ids),
            chat_template=ChatTemplate(template, bos_token, eos_token) if template else None,
        )

    @classmethod
    def toy(cls, vocab_size: int) -> "Vocabulary":
        """A vocabulary without files, for the toy backend and tests; see `toy_bytes_table` for its ids."""
        table = toy_bytes_table(vocab_size)
        eos_token_id = vocab_size - 1
        return cls(
            bytes_table=table,
            special_ids=frozenset({eos_token_id}),
            eos_token_ids=(eos_token_id,),
            bos_token_id=None,
            add_bos=False,
            strips_leading_space=False,
            encode_verbatim=lambda text: encode_toy(text, table),
            chat_template=ChatTemplate(_TOY_CHAT_TEMPLATE),
        )

    @property
    def vocab_size(self) -> int:
        """Ids that have a token; a model's output head may be padded beyond it."""
        return len(self.bytes_table)

    @functools.cached_property
    def id_bytes_hash(self) -> str:
        """SHA-256 (hex) of the table id -> bytes, each entry after its length; a padded head changes nothing."""
        digest = hashlib.sha256()
        for token in self.bytes_table:
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of `text` verbatim; special-token text in it becomes special tokens.

        The model's BOS is put first if the model wants one and the text does not bring it. Raises
        `VocabularyError` for text the tokenizer cannot take.
        """
        ids = self._encode_verbatim(text)
        if self.add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of `messages` ({"role", "content"}) through the chat template, which brings its own BOS.

        Raises `ChatTemplateError` when the model has no template or refuses the messages.
        """
        return self._encode_verbatim(self.render_chat(messages))

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text `encode_chat` encodes."""
        if self.chat_template is None:
            raise ChatTemplateError("the model has no chat template; send text instead of messages")
        return self.chat_template.render(messages)

    def token_bytes(self, token_id: int) -> bytes:
        """The id's bytes; none for an id outside the vocabulary."""
        return self.bytes_table[token_id] if 0 <= token_id < len(self.bytes_table) else b""

    def decode(self, token_ids: Iterable[int], skip_special: bool = True, at_start: bool = True) -> str:
        """The text of `token_ids`; `at_start`: no text comes before them, so a leading space may be an artefact."""
        shown = (token_id for token_id in token_ids if not (skip_special and token_id in self.special_ids))
        text = b"".join(map(self.token_bytes, shown)).decode(errors="replace")
        return text.removeprefix(" ") if at_start and self.strips_leading_space else text

    def _encode_verbatim(self, text: str) -> list[int]:
        try:
            return self.encode_verbatim(text)
        except (ValueError, TypeError) as error:  # a character outside the toy alphabet; a lone surrogate
            raise VocabularyError(f"the text cannot be encoded: {error}") from error


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file, or None when there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise VocabularyError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise VocabularyError(f"{path} does not hold a JSON object")
    return content


def _token_text(config: Mapping[str, Any], key: str) -> str:
    """A token's text in tokenizer_config.json: a string, or an object with its content."""
    token = config.get(key) or ""
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def _wants_bos(config: Mapping[str, Any], tokenizer: Tokenizer, bos_token_id: int | None) -> bool:
    """The config's word, or else whether the tokenizer's post-processor puts BOS before a text."""
    if "add_bos_token" in config:
        return bool(config["add_bos_token"])
    return bos_token_id is not None and tokenizer.encode("", add_special_tokens=True).ids[:1] == [bos_token_id]


def _read_eos_token_ids(directory: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Every id that ends a sequence: the tokenizer's, and those of the generation and model configs."""
    found = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        ids = (_read_json(directory / name) or {}).get("eos_token_id")
        found |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))


def _read_chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The template's source: its own file, or the config's entry (a string, or named ones of which `default`)."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((str(entry["template"]) for entry in template if entry["name"] == "default"), None)
    return None if template is None else str(template)
