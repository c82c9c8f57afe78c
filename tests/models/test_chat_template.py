"""Chat templates: what they can use, and what is refused."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from tandem.chat_template import ChatTemplate, ChatTemplateError

FIXTURE = Path(__file__).parents[1] / "fixtures" / "tokenizer_smollm2_135m.json"
RECORDED = json.loads(FIXTURE.read_text(encoding="utf-8"))
HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("chat", RECORDED["chats"], ids=lambda chat: str(len(chat["messages"])))
def test_the_demo_template_renders_as_transformers_does(chat: dict[str, Any]) -> None:
    template = ChatTemplate(RECORDED["chat_template"], "<|im_start|>", "<|im_end|>")

    assert template.render(chat["messages"]) == chat["text"]


def test_blocks_leave_no_blank_lines_and_tokens_are_known() -> None:
    template = ChatTemplate(
        "{{ bos_token }}\n  {% for m in messages %}\n{{ m.content }}{{ eos_token }}\n  {% break %}\n{% endfor %}\n",
        "<s>",
        "</s>",
    )

    assert template.render([*HELLO, *HELLO]) == "<s>\nhi</s>\n"


def test_the_generation_prompt_can_be_left_out() -> None:
    template = ChatTemplate("{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}")

    assert template.render(HELLO) == "hi>"
    assert template.render(HELLO, add_generation_prompt=False) == "hi"


def test_json_keeps_characters_and_dates_are_todays() -> None:
    assert (
        ChatTemplate("{{ messages[0].content | tojson }}").render([{"role": "user", "content": "<é>"}]) == '"<é>"'
    )
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(HELLO) == str(datetime.datetime.now().year)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages is empty"),
        (
            [*HELLO, {"role": "robot", "content": ""}],
            r"messages\[1\].role is 'robot'; it must be one of system, user",
        ),
        ([{"content": "hi"}], r"messages\[0\].role is None"),
        ([{"role": "user"}], r"messages\[0\].content is not text"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is not text"),
    ],
)
def test_bad_messages_are_refused_by_place(messages: list[Any], named: str) -> None:
    with pytest.raises(ChatTemplateError, match=named):
        ChatTemplate("x").render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ missing.attribute }}",
        "{% include 'file' %}",
    ],
)
def test_what_a_template_must_not_do_is_a_typed_error(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="chat template refused the messages"):
        ChatTemplate(source).render(HELLO)


def test_a_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(HELLO)


def test_a_template_that_does_not_compile_is_refused_at_once() -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% if %}")
