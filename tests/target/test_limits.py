"""Limits that cannot hold together are refused when the service starts, naming both."""

from dataclasses import replace

import pytest

from engine.backends.base import KvUsage
from target_service.limits import Limits
from tests.target.harness import toy

POOL = KvUsage(total_blocks=4, used_blocks=0, cached_blocks=0, free_blocks=4, block_size=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_draft_tokens": 16, "max_step_tokens": 16},
            r"--max-step-tokens 16 .*--max-draft-tokens 16 .*17 rows",
        ),
        ({"max_prefill_tokens": 513}, r"--max-prefill-tokens 513 is more than --max-step-tokens 512"),
        ({"max_batch": 40, "max_step_tokens": 32}, r"--max-batch 40 is more than --max-step-tokens 32"),
        ({"max_batch": 9, "max_sessions": 8}, r"--max-batch 9 is more than --max-sessions 8"),
        ({"max_batch": 1}, r"--max-batch 1 is less than 2"),
        ({"max_sessions": 0}, r"--max-sessions 0 is less than 1"),
        ({"max_waiting_sessions": -1}, r"--max-waiting-sessions -1 is less than 0"),
        ({"max_draft_tokens": -1}, r"--max-draft-tokens -1 is less than 0"),
        ({"max_prefill_tokens": 0}, r"--max-prefill-tokens 0 is less than 1"),
        ({"session_lease_s": -0.5}, r"--session-lease -0.5 is less than 0"),
    ],
)
def test_limits_that_cannot_hold_are_refused_by_name(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Limits(), **changes)  # type: ignore[arg-type]


def test_limits_that_are_not_given_follow_those_that_are() -> None:
    assert (Limits().prefill_tokens, Limits(max_step_tokens=64).prefill_tokens) == (128, 64)
    assert Limits(max_prefill_tokens=300).prefill_tokens == 300
    assert (Limits(max_step_tokens=40).batch_size, Limits(max_batch=7).batch_size) == (40, 7)
    assert Limits(max_draft_tokens=15, max_step_tokens=16).max_step_tokens == 16


def test_a_pool_without_room_for_one_round_is_refused_naming_both_options() -> None:
    with pytest.raises(ValueError, match=r"--kv-memory holds 16 tokens .*--max-draft-tokens 16 drafts needs 17"):
        Limits().check_pool(toy().capabilities, POOL)
    assert Limits(max_draft_tokens=15).check_pool(toy(max_context=16).capabilities, POOL) is None


def test_a_pool_that_cannot_hold_the_longest_request_is_named_at_the_start() -> None:
    warning = Limits(max_draft_tokens=15).check_pool(toy(max_context=17).capabilities, POOL)
    assert warning is not None
    assert "--kv-memory holds 16 tokens, fewer than the --max-context of 17" in warning
