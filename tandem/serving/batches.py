"""How items of an inner stream gather into messages: small ones together, and never more than gRPC carries."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from google.protobuf.message import Message

from tandem.serving.channels import MAX_INNER_MESSAGE_BYTES
from tandem.types import ErrorCode, ItemError

MessageT = TypeVar("MessageT", bound=Message)

MAX_BATCH_ITEMS = 256
MAX_BATCH_BYTES = 1024 * 1024  # of more than one item; larger messages are slower than two
MAX_ITEM_BYTES = MAX_INNER_MESSAGE_BYTES - 4096  # what is left is for the message around it


def batches_of(
    items: Iterable[MessageT], replace_oversized: Callable[[MessageT, ItemError], MessageT | None]
) -> Iterator[list[MessageT]]:
    """The items in order, in lists that each fit one message.

    An item that fits none is given to `replace_oversized`, with an error that says so; what that returns travels
    instead.
    """
    batch: list[MessageT] = []
    batch_bytes = 0
    for item in items:
        sent: MessageT | None = item
        item_bytes = item.ByteSize()
        if item_bytes > MAX_ITEM_BYTES:
            sent, item_bytes = replace_oversized(item, _oversized(item)), 0
        if sent is None:
            continue
        if batch and (len(batch) == MAX_BATCH_ITEMS or batch_bytes + item_bytes > MAX_BATCH_BYTES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(sent)
        batch_bytes += item_bytes
    if batch:
        yield batch


def _oversized(item: Message) -> ItemError:
    what = f"a {item.DESCRIPTOR.name} of {item.ByteSize()} bytes"
    return ItemError(
        ErrorCode.INVALID_ARGUMENT,
        f"{what} is more than the limit of {MAX_ITEM_BYTES} bytes that one message holds",
    )
