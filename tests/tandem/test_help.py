"""Help as a user reads it: the command by its name, and defaults only where there are some."""

import re
from argparse import ArgumentParser, BooleanOptionalAction

import pytest

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
