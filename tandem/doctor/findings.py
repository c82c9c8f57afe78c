"""One thing that was looked at, and what was found."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "OK"
    WARNING = "WARNING"  # it works, slower or with less than there could be
    PROBLEM = "PROBLEM"  # something does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One line."""

    level: Level
    subject: str
    text: str
    advice: str = ""  # what to do; empty when nothing is to be done

    def __str__(self) -> str:
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.level:<8} {self.subject}: {self.text}{advice}"


def ok(subject: str, text: str) -> Finding:
    return Finding(Level.OK, subject, text)


def warning(subject: str, text: str, advice: str) -> Finding:
    return Finding(Level.WARNING, subject, text, advice)


def problem(subject: str, text: str, advice: str) -> Finding:
    return Finding(Level.PROBLEM, subject, text, advice)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 when there is a PROBLEM."""
    return int(any(finding.level is Level.PROBLEM for finding in findings))
