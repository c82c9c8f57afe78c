"""What a generation gives back, folded from the server's events; the same for the async and the sync client."""

from dataclasses import dataclass

from tandem import codec
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.types import DraftProbsTransport, FinishReason, ItemTiming, TokenLogprobs, VerificationPolicy


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added. The text may lag behind the tokens until the last chunk."""

    text: str
    token_ids: tuple[int, ...]
    num_draft_tokens: int
    num_accepted: int
    sample_index: int  # whose tokens these are
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token when asked for, else empty


@dataclass(frozen=True, slots=True)
class Speculation:
    """One answer's speculation figures."""

    num_rounds: int  # target passes
    num_draft_tokens: int
    num_accepted: int
    num_draft_tokens_per_pos: tuple[int, ...]
    num_accepted_per_pos: tuple[int, ...]
    num_fallback_rounds: int
    num_reopens: int
    draft_wait_s: float
    verify_wait_s: float
    draft_timing: ItemTiming  # of draft_wait_s, as the draft service measured it; the rest is the way
    verify_timing: ItemTiming

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; None when nothing was drafted."""
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / rounds; None without a round."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished answer. Of one that was resumed, times and speculation figures are those of the last call."""

    request_id: str
    sample_index: int
    model_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None  # the stop string, or the EOS or stop id, that ended it
    seed: int  # with the same request and sample index, gives the same answer again
    verification_policy: VerificationPolicy | None
    draft_probs_transport: DraftProbsTransport | None  # how the draft's distribution reached the target
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, not computed since an earlier request had begun with them
    time_to_first_token_s: float
    generation_s: float  # from the first round's tokens to the last round's
    tokens_per_second: float | None  # tokens after the first round / generation_s; None for a single round
    speculation: Speculation
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token when asked for, else empty

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids)


class ResultFolder:
    """Takes one answer's events in order; `result` is there after the last."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.result: GenerationResult | None = None
        self._started = pb.GenerateStarted()
        self._num_first_tokens = 0
        self._num_resumed_tokens = 0  # that an earlier call has brought

    def fold(self, event: pb.GenerateResponse) -> Chunk | None:
        """The event's chunk, if it is one."""
        kind = event.WhichOneof("event")
        if kind == "started":
            self._started = event.started
            self._num_resumed_tokens = len(self.token_ids)
        elif kind == "complete":
            self.result = self._result(event.complete)
        elif kind == "chunk":
            chunk = event.chunk
            if len(self.token_ids) == self._num_resumed_tokens:
                self._num_first_tokens = len(chunk.token_ids)
            self.texts.append(chunk.text)
            self.token_ids.extend(chunk.token_ids)
            logprobs = tuple(map(codec.token_logprobs_from_proto, chunk.logprobs))
            self.logprobs.extend(logprobs)
            return Chunk(
                chunk.text,
                tuple(chunk.token_ids),
                chunk.num_draft_tokens,
                chunk.num_accepted,
                chunk.sample_index,
                logprobs,
            )
        return None

    def _result(self, complete: pb.GenerateComplete) -> GenerationResult:
        matched = complete.WhichOneof("matched_stop")
        generation_s = complete.usage.generation_us / 1e6
        num_timed_tokens = len(self.token_ids) - self._num_resumed_tokens - self._num_first_tokens
        return GenerationResult(
            request_id=self._started.request_id,
            sample_index=complete.sample_index,
            model_id=self._started.model_id,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            finish_reason=codec.finish_reason_from_proto(complete.finish_reason) or FinishReason.ERROR,
            matched_stop=getattr(complete, matched) if matched else None,
            seed=self._started.seed,
            verification_policy=codec.policy_from_proto(self._started.verification_policy),
            draft_probs_transport=codec.transport_from_proto(self._started.draft_probs_transport),
            num_prompt_tokens=self._started.num_prompt_tokens,
            num_cached_tokens=complete.usage.num_cached_tokens,
            time_to_first_token_s=complete.usage.time_to_first_token_us / 1e6,
            generation_s=generation_s,
            tokens_per_second=num_timed_tokens / generation_s if num_timed_tokens and generation_s else None,
            speculation=_speculation(complete.speculation),
            logprobs=tuple(self.logprobs),
        )


def _speculation(stats: pb.SpeculationStats) -> Speculation:
    return Speculation(
        num_rounds=stats.num_rounds,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted=stats.num_accepted,
        num_draft_tokens_per_pos=tuple(stats.num_draft_tokens_per_pos),
        num_accepted_per_pos=tuple(stats.num_accepted_per_pos),
        num_fallback_rounds=stats.num_fallback_rounds,
        num_reopens=stats.num_reopens,
        draft_wait_s=stats.draft_wait_us / 1e6,
        verify_wait_s=stats.verify_wait_us / 1e6,
        draft_timing=codec.timing_from_proto(stats.draft_timing),
        verify_timing=codec.timing_from_proto(stats.verify_timing),
    )
