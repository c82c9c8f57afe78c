"""As much of PromQL as it takes to see which metrics and labels an expression names."""

import re
from dataclasses import dataclass, field

_AGGREGATIONS = {"sum", "max", "min", "avg", "count"}
_FUNCTIONS = {"rate", "increase", "histogram_quantile"} | _AGGREGATIONS
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_TOKEN = re.compile(
    r'\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<name>[A-Za-z_:][\w:]*)|(?P<range>\[[^\]]*\])'
    r"|(?P<number>\d+(?:\.\d+)?)|(?P<operator>=~|!~|!=|==|>=|<=|[-+*/(){},=<>]))"
)


class PromqlError(ValueError):
    """An expression that cannot be read."""


@dataclass
class Selector:
    """One metric, and what is asked of its labels."""

    metric: str
    matchers: dict[str, tuple[str, str]] = field(default_factory=dict)  # label -> (operator, value)


@dataclass
class Expression:
    """What an expression names."""

    selectors: list[Selector] = field(default_factory=list)
    grouping: set[str] = field(default_factory=set)  # labels of by (...) and its like
    is_aggregated: bool = False  # its result has the labels of `grouping` only


def read_promql(text: str) -> Expression:
    """PromqlError for what is not understood, so that nothing goes unchecked."""
    tokens = _tokens(text)
    found = Expression()
    index = 0
    while index < len(tokens):
        kind, token = tokens[index]
        following = tokens[index + 1][1] if index + 1 < len(tokens) else ""
        index += 1
        if kind != "name":
            continue
        if token in _GROUPING:
            end = tokens.index(("operator", ")"), index)
            found.grouping |= {name for name_kind, name in tokens[index:end] if name_kind == "name"}
            index = end + 1
        elif token in _FUNCTIONS:
            if following not in ("(", "by", "without"):
                raise PromqlError(f"{text}: {token} is no call")
            found.is_aggregated |= token in _AGGREGATIONS
        elif following == "(":
            raise PromqlError(f"{text}: {token} is no function known here")
        else:
            selector = Selector(token)
            found.selectors.append(selector)
            if following == "{":
                end = tokens.index(("operator", "}"), index)
                selector.matchers = _matchers(text, tokens[index + 1 : end])
                index = end + 1
    return found


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, position = [], 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            raise PromqlError(f"{text}: cannot be read from {text[position:]!r} on")
        assert match.lastgroup is not None
        tokens.append((match.lastgroup, match[match.lastgroup]))
        position = match.end()
    return tokens


def _matchers(text: str, tokens: list[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """label, operator, value, comma; again and again."""
    matchers = {}
    for start in range(0, len(tokens), 4):
        kinds = [kind for kind, _ in tokens[start : start + 3]]
        if kinds != ["name", "operator", "string"]:
            raise PromqlError(f"{text}: the labels cannot be read")
        (_, label), (_, operator), (_, value) = tokens[start : start + 3]
        matchers[label] = operator, value[1:-1]
    return matchers
