"""What an application is sent about its request: it has started, what a round added, an answer is complete."""

from dataclasses import replace

from orchestrator.replica_link import DraftLink, TargetLink
from orchestrator.requests import CheckedRequest
from orchestrator.sequence import RoundOutput, Sequence
from tandem import codec
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.types import Load, ModelInfo, TokenLogprobs
from tandem.vocabulary import Vocabulary


def replica(link: TargetLink | DraftLink, load: Load) -> pb.Replica:
    """A replica as it is known now."""
    message = pb.Replica(
        role=link.api.role,
        address=link.address,
        is_connected=link.is_up,
        load=codec.load_to_proto(load),
        num_sessions=link.num_sessions,
        problem="" if link.is_up else link.why_not(),
    )
    if link.info is not None:
        message.model.CopyFrom(codec.model_info_to_proto(link.info.model))
        message.proposer = link.info.proposer
    return message


def started(checked: CheckedRequest, model: ModelInfo) -> pb.GenerateResponse:
    """What was chosen for all of its answers."""
    spec = checked.spec
    message = pb.GenerateStarted(
        request_id=checked.request_id,
        num_prompt_tokens=spec.prompt_len,
        seed=spec.sampling.seed or 0,
        verification_policy=codec.policy_to_proto(spec.verification_policy),
        model_id=model.model_id,
        numerics=model.numerics,
        draft_probs_transport=codec.transport_to_proto(spec.draft_probs_transport),
    )
    return pb.GenerateResponse(started=message)


def chunk(output: RoundOutput, sample_index: int, vocabulary: Vocabulary) -> pb.GenerateResponse:
    """A round of one answer; its logprobs with the bytes of every token they name."""
    entries = (
        codec.token_logprobs_to_proto(_with_bytes(entry, token_id, vocabulary))
        for token_id, entry in zip(
            output.token_ids, output.logprobs, strict=False
        )  # none unless they were asked for
    )
    message = pb.GenerateChunk(
        text=output.text,
        token_ids=output.token_ids,
        num_draft_tokens=output.num_draft_tokens,
        num_accepted=output.num_accepted,
        logprobs=entries,
        sample_index=sample_index,
    )
    return pb.GenerateResponse(chunk=message)


def _with_bytes(entry: TokenLogprobs, token_id: int, vocabulary: Vocabulary) -> TokenLogprobs:
    return replace(
        entry,
        token_bytes=vocabulary.token_bytes(token_id),
        top_token_bytes=tuple(map(vocabulary.token_bytes, entry.top_token_ids)),
    )


def complete(sequence: Sequence) -> pb.GenerateResponse:
    """The end of one answer, and its figures."""
    usage = pb.Usage(
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_completion_tokens=sequence.num_completion_tokens,
        time_to_first_token_us=round(sequence.time_to_first_token_s * 1e6),
        generation_us=round(sequence.generation_s * 1e6),
        num_cached_tokens=sequence.num_cached_tokens,
    )
    message = pb.GenerateComplete(
        finish_reason=codec.finish_reason_to_proto(sequence.finish_reason),
        usage=usage,
        speculation=sequence.stats.to_proto(),
        sample_index=sequence.sample_index,
    )
    if sequence.matched_token_id is not None:
        message.matched_token_id = sequence.matched_token_id
    elif sequence.matched_stop_string is not None:
        message.matched_stop_string = sequence.matched_stop_string
    return pb.GenerateResponse(complete=message)
