"""A caller's trace context travels with every item of its request, so nothing else may."""

from typing import Any

import pytest

from orchestrator.call import traceparent_of

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Call:
    def __init__(self, **metadata: Any) -> None:
        self._metadata = tuple(metadata.items())

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        return self._metadata


def test_a_trace_context_is_taken_as_it_is() -> None:
    assert traceparent_of(Call(other="x", traceparent=CONTEXT)) == CONTEXT  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["", "x", CONTEXT.upper(), CONTEXT + "-" + "x" * 4000, CONTEXT.encode()])
def test_anything_else_is_as_if_it_were_not_there(value: Any) -> None:
    assert traceparent_of(Call(traceparent=value)) == ""  # type: ignore[arg-type]
