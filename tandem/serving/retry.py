"""When a refused call may be tried again: google.rpc.RetryInfo among a status's details, as gRPC clients expect it."""

from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

_NANOS = 1_000_000_000


def retry_metadata(
    code: grpc.StatusCode, details: str, retry_after_s: float | None
) -> tuple[tuple[str, bytes | str], ...]:
    """Trailing metadata that says it; none without a time."""
    if retry_after_s is None:
        return ()
    nanos = round(retry_after_s * _NANOS)
    info = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=nanos // _NANOS, nanos=nanos % _NANOS))
    packed = AnyMessage()
    packed.Pack(info)
    status = status_pb2.Status(code=code.value[0], message=details, details=[packed])
    return tuple(rpc_status.to_status(status).trailing_metadata)


def retry_after_s(error: Any) -> float | None:
    """What a failed call's status says of it; None when nothing, or nothing that can be read."""
    data = next((value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"), None)
    if data is None:
        return None
    try:
        status = status_pb2.Status.FromString(data)
    except DecodeError:
        return None
    info = error_details_pb2.RetryInfo()
    for one in status.details:
        if one.Is(info.DESCRIPTOR) and one.Unpack(info):
            return float(info.retry_delay.seconds + info.retry_delay.nanos / _NANOS)
    return None
