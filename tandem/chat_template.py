"""Render chat messages through a model's own jinja2 template, in a sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROLES = ("system", "user", "assistant", "tool")


class ChatTemplateError(Exception):
    """Messages or a template that cannot be rendered; the message names the message's index or the reason."""


class ChatTemplate:
    """One compiled template; rendering depends on the messages alone, and on the date if it asks for that."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template does not compile: {error}") from error
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt text of `messages`, each {"role", "content"}; it ends where the assistant would start.

        Raises `ChatTemplateError` for no messages, an unknown role, missing text, or what the template refuses.
        """
        _check(messages)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ChatTemplateError(f"the model's chat template refused the messages: {error}") from error


def _check(messages: Sequence[Mapping[str, str]]) -> None:
    if not messages:
        raise ChatTemplateError("messages is empty; at least one message is needed")
    for index, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise ChatTemplateError(
                f"messages[{index}].role is {message.get('role')!r}; it must be one of {', '.join(ROLES)}"
            )
        if not isinstance(message.get("content"), str):
            raise ChatTemplateError(f"messages[{index}].content is not text")


def _to_json(value: Any, indent: int | None = None) -> str:
    """jinja2's own filter escapes HTML characters, which models were not trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    """What templates call to refuse messages."""
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
