"""One call of Generate, event by event, and what must hold for every such call."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem import codec
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.types import FinishReason, TokenLogprobs
from tandem.vocabulary import Vocabulary
from tests.identity.plain import Answer, complete_text


@dataclass
class StreamedAnswer:
    """What has arrived of one answer."""

    chunks: list[pb.GenerateChunk] = field(default_factory=list)
    complete: pb.GenerateComplete | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for chunk in self.chunks for token_id in chunk.token_ids)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [codec.token_logprobs_from_proto(entry) for chunk in self.chunks for entry in chunk.logprobs]

    @property
    def answer(self) -> Answer:
        """The finished answer."""
        assert self.complete is not None
        matched = self.complete.WhichOneof("matched_stop")
        return Answer(
            self.token_ids,
            self.text,
            codec.finish_reason_from_proto(self.complete.finish_reason) or FinishReason.ERROR,
            getattr(self.complete, matched) if matched else None,
        )

    def check(self, expected: Answer, vocabulary: Vocabulary, stops: Sequence[str]) -> None:
        """What has arrived is the expected answer, or the beginning of it; no text came early or too late."""
        longest = max(map(len, stops), default=1)
        token_ids: list[int] = []
        text = ""
        for chunk in self.chunks:
            token_ids += chunk.token_ids
            text += chunk.text
            assert tuple(token_ids) == expected.token_ids[: len(token_ids)]
            assert expected.text.startswith(text)
            if len(token_ids) < len(expected.token_ids):
                assert len(complete_text(vocabulary, token_ids)) - len(text) < longest
        if self.complete is not None:
            assert self.answer == expected
            assert self.complete.usage.num_completion_tokens == len(expected.token_ids)
            self._check_figures(self.complete.speculation)

    def _check_figures(self, stats: pb.SpeculationStats) -> None:
        """The rounds' figures add up to the answer's."""
        assert stats.num_rounds == len(self.chunks)
        for chunk in self.chunks:
            num_own = len(chunk.token_ids) - chunk.num_accepted
            assert num_own == 1 or (num_own == 0 and chunk is self.chunks[-1])
            assert chunk.num_accepted <= chunk.num_draft_tokens
        for name in ("num_draft_tokens", "num_accepted"):
            assert sum(getattr(chunk, name) for chunk in self.chunks) == getattr(stats, name)
            assert sum(getattr(stats, f"{name}_per_pos")) == getattr(stats, name)


@dataclass
class Streamed:
    """What has arrived of one call; AssertionError for an event that must not come where it comes."""

    started: pb.GenerateStarted | None = None
    answers: dict[int, StreamedAnswer] = field(default_factory=dict)  # by sample index

    async def read(self, call: Any, max_chunks: int | None = None) -> bool:
        """Until the end, or until so many chunks have come; whether the end was reached."""
        async for event in call:
            self._take(event)
            if sum(len(answer.chunks) for answer in self.answers.values()) == max_chunks:
                return False
        assert all(answer.complete is not None for answer in self.answers.values())
        return True

    def _take(self, event: pb.GenerateResponse) -> None:
        kind = event.WhichOneof("event")
        assert (self.started is None) == (kind == "started"), f"{kind} out of order"
        if kind == "started":
            self.started = event.started
            return
        message = event.chunk if kind == "chunk" else event.complete
        answer = self.answers.setdefault(message.sample_index, StreamedAnswer())
        assert answer.complete is None, f"{kind} after the end"
        if kind == "complete":
            answer.complete = event.complete
        else:
            assert event.chunk.token_ids
            answer.chunks.append(event.chunk)
