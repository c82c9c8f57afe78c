"""Items gather into messages: every one of them once and in order, and no message passes what gRPC carries."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.serving import batches
from tandem.serving.batches import MAX_BATCH_BYTES, MAX_BATCH_ITEMS, MAX_ITEM_BYTES, batches_of
from tandem.serving.channels import MAX_INNER_MESSAGE_BYTES
from tandem.target.v1 import target_pb2 as pb
from tandem.types import MAX_DRAFT_PROBS_BYTES, ErrorCode, ItemError


def item(number: int, num_bytes: int) -> pb.VerifyItem:
    return pb.VerifyItem(stamp={"session_id": number}, traceparent="x" * num_bytes)


def refuse(item: pb.VerifyItem, error: ItemError) -> None:
    raise AssertionError(error)


SIZES = st.one_of(st.integers(0, 100), st.integers(100_000, 600_000), st.sampled_from([MAX_BATCH_BYTES + 1]))


@given(st.lists(SIZES, max_size=12), st.integers(0, 600))
@settings(max_examples=40, deadline=None)
def test_every_item_travels_once_in_order_and_a_list_ends_only_where_the_next_item_does_not_fit(
    sizes: list[int], num_small: int
) -> None:
    items = [item(number, size) for number, size in enumerate([*sizes, *[1] * num_small])]
    lists = list(batches_of(items, refuse))
    assert [one for items_of_one in lists for one in items_of_one] == items
    for items_of_one in lists:
        assert len(items_of_one) <= MAX_BATCH_ITEMS
        assert len(items_of_one) == 1 or sum(one.ByteSize() for one in items_of_one) <= MAX_BATCH_BYTES
        assert pb.VerifyRequest(items=items_of_one).ByteSize() <= MAX_INNER_MESSAGE_BYTES
    for items_of_one, following in pairwise(lists):
        num_bytes = sum(one.ByteSize() for one in [*items_of_one, following[0]])
        assert len(items_of_one) == MAX_BATCH_ITEMS or num_bytes > MAX_BATCH_BYTES


def test_the_largest_item_fits_one_message_and_holds_the_largest_proposal() -> None:
    largest = item(1, MAX_ITEM_BYTES - 9)
    assert largest.ByteSize() == MAX_ITEM_BYTES
    ((sent,),) = batches_of([largest], refuse)
    assert pb.VerifyRequest(items=[sent]).ByteSize() <= MAX_INNER_MESSAGE_BYTES
    assert MAX_DRAFT_PROBS_BYTES < MAX_ITEM_BYTES


def test_an_item_that_no_message_holds_is_refused_by_name_and_the_others_travel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "MAX_ITEM_BYTES", 50)
    refused: list[ItemError] = []

    def drop(item: pb.VerifyItem, error: ItemError) -> None:
        refused.append(error)

    assert list(batches_of([item(1, 5), item(2, 60), item(3, 5)], drop)) == [[item(1, 5), item(3, 5)]]
    (error,) = refused
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert error.message == "a VerifyItem of 66 bytes is more than the limit of 50 bytes that one message holds"
    (sent,) = batches_of([item(1, 5), item(2, 60)], lambda large, _: item(large.stamp.session_id, 1))
    assert sent == [item(1, 5), item(2, 1)]
