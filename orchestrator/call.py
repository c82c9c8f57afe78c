"""What a call says besides its request."""

from typing import Any, TypeAlias

import grpc

from tandem.serving.logs import trace_id_of

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_NOTICE_S, _NOTICE_SHARE = 0.05, 0.05  # of a call's time, whichever is less


def time_to_answer(context: Context) -> float | None:
    """Seconds; the last of a call's time is kept to tell the client, before its own clock does, who was waited for."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else remaining_s - min(_NOTICE_S, _NOTICE_SHARE * remaining_s)


def traceparent_of(context: Context) -> str:
    """The caller's W3C trace context, if it sent one and nothing else: every item of the request carries it."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str) and trace_id_of(value):
            return value
    return ""
