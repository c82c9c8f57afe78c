"""The toy draft: the target's vocabulary and seed, other logits, quicker steps."""

from dataclasses import replace

import pytest

from engine.backends.toy_options import parse_toy_options
from loadtest.toy import toy_draft


def test_a_toy_draft_differs_from_its_target_in_logits_and_speed_only() -> None:
    target = parse_toy_options("hashed:vocab=512,seed=3,delay_ms=50")
    draft = parse_toy_options(toy_draft("hashed:vocab=512,seed=3,delay_ms=50"))
    assert draft == replace(target, blend=0.2, delay_ms=5.0)
    assert parse_toy_options(toy_draft("hashed:vocab=8")).delay_ms == 0


def test_options_there_are_not_are_named() -> None:
    with pytest.raises(ValueError, match="speed"):
        toy_draft("hashed:speed=1")
