"""Which replicas may serve together: one protocol, one vocabulary."""

from collections.abc import Callable

from orchestrator.replica_api import ReplicaInfo
from orchestrator.replica_link import HandshakeError
from tandem.types import PROTOCOL_VERSION
from tandem.vocabulary import Vocabulary


def vocabulary_check(
    role: str, address: str, tokenizer: Vocabulary, tokenizer_name: str
) -> Callable[[ReplicaInfo], None]:
    """A check of a replica against the orchestrator's tokenizer: HandshakeError names both sides.

    The hash covers the table id -> bytes without the padding of an output head, so sizes may differ by that. A
    replica without a vocabulary of its own (no hash, no size) fits any.
    """

    def check(info: ReplicaInfo) -> None:
        model = info.model
        there = f"{role} service at {address} (model {model.model_id!r})"
        if model.protocol_version != PROTOCOL_VERSION:
            raise HandshakeError(
                f"{there} speaks protocol version {model.protocol_version}, the orchestrator {PROTOCOL_VERSION}"
            )
        has_other_table = model.vocab_hash not in ("", tokenizer.id_bytes_hash)
        if has_other_table or 0 < model.vocab_size < tokenizer.vocab_size:
            raise HandshakeError(
                f"vocabularies differ: {there} has {model.vocab_size} ids, hash {model.vocab_hash[:16] or 'none'}; "
                f"the orchestrator's tokenizer {tokenizer_name!r} has {tokenizer.vocab_size} ids, "
                f"hash {tokenizer.id_bytes_hash[:16]}"
            )

    return check
