"""Help as a user reads it: whole, the command by its name, and defaults only where there are some."""

import re
from argparse import ArgumentParser, BooleanOptionalAction
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tandem.cli import app
from tandem.serving.options import make_parser
from tests.tandem.test_up import PARSERS


@pytest.mark.parametrize(("service", "parser"), PARSERS.items())
def test_a_services_help_is_of_its_command_and_says_no_default_that_says_nothing(
    service: str, parser: ArgumentParser
) -> None:
    text = parser.format_help()
    assert text.startswith(f"usage: tandem serve {service} ")
    assert not re.search(r"default:\s+(None|True|False)", text)
    assert "536870912" not in text
    assert re.search(r"\(default:\s+127\.0\.0\.1:500", text)


def test_what_is_on_by_default_says_so_and_what_is_off_says_nothing() -> None:
    parser = make_parser("x", "")
    parser.add_argument("--quick", action="store_true", help="hurry")
    parser.add_argument("--warm", action=BooleanOptionalAction, default=True, help="heat")
    parser.add_argument("--size", type=int, default=3, help="in all")
    parser.add_argument("--name", help="of it; default: a random one")
    words = " ".join(parser.format_help().split())
    assert words.endswith(
        "--quick hurry --warm, --no-warm heat (default: on) --size SIZE in all (default: 3) "
        "--name NAME of it; default: a random one"
    )


def found_commands() -> dict[tuple[str, ...], Any]:
    """Every command by its words."""
    found: dict[tuple[str, ...], Any] = {(): get_command(app)}
    for words, command in found.copy().items():
        for name, inner in command.commands.items():
            found[(*words, name)] = inner
            found |= {(*words, name, deeper): one for deeper, one in getattr(inner, "commands", {}).items()}
    return found


COMMANDS = found_commands()


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize(
    "words", [words for words, one in COMMANDS.items() if one.context_settings.get("help_option_names") != []]
)
def test_a_commands_help_is_whole_at_any_width(words: tuple[str, ...], columns: int) -> None:
    answer = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": str(columns)})
    assert answer.exit_code == 0
    assert "…" not in answer.stdout
    text = "".join(answer.stdout.split())
    command = COMMANDS[words]
    told = [command.help, *(option.help for option in command.params)]
    told += [name for option in command.params for name in (*option.opts, *option.secondary_opts)]
    told += [one.help.partition("\n\n")[0] for one in getattr(command, "commands", {}).values()]
    assert [one for one in told if one and "".join(one.split()) not in text] == []
