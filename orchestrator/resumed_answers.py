"""What a request that goes on says that its answers have already, checked."""

from collections.abc import Mapping

from tandem import codec
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.types import SessionSpec
from tandem.validation import InvalidArgumentError, check_range


def check_resumed(request: pb.GenerateRequest, spec: SessionSpec, vocab_size: int) -> Mapping[int, tuple[int, ...]]:
    """The tokens that answers have, by sample index; InvalidArgumentError for what none of the request can have."""
    resumed: dict[int, tuple[int, ...]] = {}
    sample_indices = codec.sample_indices(request)
    for number, answer in enumerate(request.resume):
        field, token_ids = f"resume[{number}]", tuple(answer.token_ids)
        if answer.sample_index not in sample_indices or answer.sample_index in resumed:
            raise InvalidArgumentError(
                f"{field}.sample_index",
                f"{answer.sample_index} is not one of {sample_indices.start}..{sample_indices.stop - 1}, each once",
            )
        if len(token_ids) > spec.max_tokens:
            raise InvalidArgumentError(
                f"{field}.token_ids", f"{len(token_ids)} tokens are more than the {spec.max_tokens} of max_tokens"
            )
        _check_can_be_sampled(f"{field}.token_ids", token_ids, spec, vocab_size)
        resumed[answer.sample_index] = token_ids
    if resumed and not request.sampling.HasField("seed"):
        raise InvalidArgumentError("resume", "needs sampling.seed, that of the call which is resumed")
    if resumed and not request.numerics:
        raise InvalidArgumentError("resume", "needs numerics, as `started` named them in the call which is resumed")
    return resumed


def _check_can_be_sampled(field: str, token_ids: tuple[int, ...], spec: SessionSpec, vocab_size: int) -> None:
    """InvalidArgumentError for a token that the request's own masks keep from ever being sampled.

    A bias is no mask: even -100 leaves a token its chance. Tokens after the end are the sequence's to refuse.
    """
    allowed, bad = set(spec.sampling.allowed_token_ids), set(spec.sampling.bad_token_ids)
    for index, token_id in enumerate(token_ids):
        where = f"{field}[{index}]"
        check_range(where, token_id, 0, vocab_size - 1)
        if allowed and token_id not in allowed:
            raise InvalidArgumentError(where, f"token {token_id} is not one of sampling.allowed_token_ids")
        if token_id in bad:
            raise InvalidArgumentError(where, f"token {token_id} is one of sampling.bad_token_ids")
        if index < spec.min_tokens and token_id in spec.ending_token_ids:
            raise InvalidArgumentError(
                where, f"token {token_id} ends an answer, and this one has at least {spec.min_tokens} (min_tokens)"
            )
