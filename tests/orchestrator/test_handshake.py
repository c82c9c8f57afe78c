"""Replicas with another vocabulary or protocol are refused, and the message names both sides."""

from dataclasses import replace

import pytest

from orchestrator.handshake import vocabulary_check
from orchestrator.replica_api import ReplicaInfo
from orchestrator.replica_link import HandshakeError
from tandem.types import Load, ModelInfo
from tandem.vocabulary import Vocabulary

OURS = Vocabulary.toy(64)
MODEL = ModelInfo(1, "big", 64, OURS.id_bytes_hash, 128, "toy", "float32", "cpu", "", True, 8, 1)


def check(**changes: object) -> None:
    info = ReplicaInfo(replace(MODEL, **changes), Load())  # type: ignore[arg-type]
    vocabulary_check("draft", "host:1", OURS, "small")(info)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vocab_size": 192},  # a padded output head
        {"vocab_size": 0, "vocab_hash": ""},  # a proposer without a model
    ],
)
def test_the_same_table_padded_or_no_vocabulary_at_all_is_accepted(changes: dict[str, object]) -> None:
    check(**changes)


@pytest.mark.parametrize("other", [Vocabulary.toy(192), Vocabulary.toy(63)])
def test_another_table_is_refused_and_both_sides_are_named(other: Vocabulary) -> None:
    with pytest.raises(HandshakeError) as caught:
        check(vocab_size=other.vocab_size, vocab_hash=other.id_bytes_hash)
    for part in (
        "draft service at host:1 (model 'big')",
        f"{other.vocab_size} ids",
        other.id_bytes_hash[:16],
        "'small' has 64 ids",
        OURS.id_bytes_hash[:16],
    ):
        assert part in str(caught.value)


def test_the_same_size_with_other_tokens_is_refused() -> None:
    with pytest.raises(HandshakeError, match="vocabularies differ"):
        check(vocab_hash="f" * 64)


def test_a_head_that_lacks_ids_of_the_tokenizer_is_refused() -> None:
    with pytest.raises(HandshakeError, match="63 ids"):
        check(vocab_size=63)


def test_another_protocol_version_is_refused() -> None:
    with pytest.raises(HandshakeError, match="speaks protocol version 2, the orchestrator 1"):
        check(protocol_version=2)
