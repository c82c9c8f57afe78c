"""The pages of docs/proposers/, read as tests need them."""

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "proposers"


def page(name: str) -> str:
    """A page's text."""
    return (FOLDER / name).read_text()


def table(name: str, header: str) -> dict[str, list[str]]:
    """The rows of the page's table with this header, by their first cell."""
    text = page(name)
    lines = text[text.index(header) :].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return {row[0].strip("`"): row[1:] for row in rows}


def names_in(cell: str) -> list[str]:
    """What stands in backquotes, in order."""
    return re.findall(r"`(\w+)`", cell)
