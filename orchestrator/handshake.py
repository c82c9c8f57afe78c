"""Which replicas may serve together: one protocol, one vocabulary, hidden states where they are needed."""

from collections.abc import Callable, Iterable

from orchestrator.replica_api import ReplicaInfo
from orchestrator.replica_link import HandshakeError
from tandem.types import PROTOCOL_VERSION, ModelInfo
from tandem.validation import MAX_HIDDEN_LAYERS, are_hidden_layers
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


def hidden_states_problem(draft: ReplicaInfo, target: ReplicaInfo) -> str:
    """Why the target cannot give the hidden states that the draft service needs; empty when it can, or needs not."""
    needed, model = draft.hidden_layers, target.model
    if not needed or (draft.hidden_size == model.hidden_size and are_hidden_layers(needed, model.num_layers)):
        return ""
    shown = needed[: MAX_HIDDEN_LAYERS + 1]  # a list can be as long as a message
    offered = (
        f"{model.hidden_size} numbers after each of {model.num_layers} layers" if model.hidden_size else "none"
    )
    return (
        f"proposer {draft.proposer!r} needs hidden states of {draft.hidden_size} numbers after layers "
        f"{', '.join(map(str, shown))} of the target; target model {model.model_id!r} on backend {model.backend!r} "
        f"offers {offered}"
    )


def draft_check(
    address: str, tokenizer: Vocabulary, tokenizer_name: str, targets: Callable[[], Iterable[ReplicaInfo]]
) -> Callable[[ReplicaInfo], None]:
    """`vocabulary_check` of a draft replica, and HandshakeError for one that needs what a target does not give.

    `targets`: what those that are known have said of themselves.
    """
    check_vocabulary = vocabulary_check("draft", address, tokenizer, tokenizer_name)

    def check(info: ReplicaInfo) -> None:
        check_vocabulary(info)
        for target in targets():
            problem = hidden_states_problem(info, target)
            if problem:
                raise HandshakeError(f"draft service at {address}: {problem}")

    return check


def computes_the_same(one: ModelInfo, other: ModelInfo) -> bool:
    """Whether two targets give the same bits for the same tokens."""
    return one.numerics == other.numerics


def target_check(
    address: str, tokenizer: Vocabulary, tokenizer_name: str, others: Callable[[], Iterable[ReplicaInfo]]
) -> Callable[[ReplicaInfo], None]:
    """`vocabulary_check` of a target replica, and HandshakeError for one that computes otherwise than those there are.

    `others`: what the other replicas that are up have said of themselves. A request may move between any two, and half
    an answer of each would be the answer of neither.
    """
    check_vocabulary = vocabulary_check("target", address, tokenizer, tokenizer_name)

    def check(info: ReplicaInfo) -> None:
        check_vocabulary(info)
        here = info.model
        for other in others():
            there = other.model
            if not computes_the_same(here, there):
                raise HandshakeError(
                    f"target services differ: the one at {address} computes {here.numerics!r}, "
                    f"another {there.numerics!r}"
                )

    return check
