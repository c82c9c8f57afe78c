"""Python, and the packages this build needs, by what its own metadata say."""

import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterable, Iterator

from tandem.doctor.findings import Finding, ok, problem, warning
from tandem.installing import how_to_install

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(?P<range>[^;]*)(?:;\s*(?P<marker>.*))?")
_BOUND = re.compile(r"(>=|<)\s*([\d.]+)")
_LEAST_PYTHON = (3, 11)

Version = tuple[int, ...]


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    text = ".".join(map(str, version))
    if version[:2] < _LEAST_PYTHON:
        return problem("python", f"{text} is too old", f"use {'.'.join(map(str, _LEAST_PYTHON))} or newer")
    return ok("python", text)


def installed_version(name: str) -> str | None:
    """None for a package that is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages(
    requirements: Iterable[str] | None = None, version_of: Callable[[str], str | None] = installed_version
) -> Iterator[Finding]:
    """What every process needs must be there; what only the model services need is worth a warning.

    `requirements`: as package metadata write them; None: this build's.
    """
    if requirements is None:
        requirements = importlib.metadata.requires("tandem") or ()
    for requirement in requirements:
        match = _REQUIREMENT.fullmatch(requirement)
        assert match is not None, requirement
        extra = re.search(r"extra\s*==\s*['\"](\w+)['\"]", match["marker"] or "")
        if extra is None or extra[1] == "engine":
            yield _check(match["name"], match["range"].strip(" ()"), version_of(match["name"]), extra is not None)


def _check(name: str, allowed: str, version: str | None, is_of_engine: bool) -> Finding:
    install = how_to_install("engine" if is_of_engine else "")
    if version is None:
        if is_of_engine:
            return warning(name, "is not installed, and the model services need it", f"to run them here: {install}")
        return problem(name, "is not installed", install)
    if not _fits(version, allowed):
        return problem(name, f"{version} is outside {allowed}", install)
    return ok(name, version)


def _fits(version: str, allowed: str) -> bool:
    number = _numbers(version)
    for operator, bound in _BOUND.findall(allowed):
        is_below = number < _numbers(bound)
        if is_below != (operator == "<"):
            return False
    return True


def _numbers(version: str) -> Version:
    """ "2.13.0+cpu" -> (2, 13); without trailing zeros, so that 2 and 2.0 are one version."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
