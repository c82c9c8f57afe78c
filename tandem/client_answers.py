"""What has arrived of one call's answers, each under its sample index."""

from dataclasses import dataclass

from tandem.client_errors import TandemError
from tandem.client_result import Chunk, GenerationResult, ResultFolder
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Answer:
    """What has arrived of one answer so far."""

    sample_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # one a token when asked for, else empty
    result: GenerationResult | None  # None until it is complete


class AnswersFolder:
    """Takes a call's events in order and hands each to its answer."""

    def __init__(self, sample_indices: range) -> None:
        """`sample_indices`: of the answers that were asked for."""
        self._sample_indices = sample_indices
        self._started = pb.GenerateResponse()
        self._folders: dict[int, ResultFolder] = {}  # of the answers that have begun

    def fold(self, event: pb.GenerateResponse) -> Chunk | None:
        """The event's chunk, if it is one. TandemError for a part of an answer that was not asked for."""
        kind = event.WhichOneof("event")
        if kind == "started":
            self._started = event
            for folder in self._folders.values():  # of a call that goes on with them
                folder.fold(event)
        elif kind == "chunk":
            return self._folder(event.chunk.sample_index).fold(event)
        elif kind == "complete":
            self._folder(event.complete.sample_index).fold(event)
        return None

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Those that have begun, by sample index."""
        return tuple(
            Answer(
                sample_index,
                "".join(folder.texts),
                tuple(folder.token_ids),
                tuple(folder.logprobs),
                folder.result,
            )
            for sample_index, folder in sorted(self._folders.items())
        )

    @property
    def num_tokens(self) -> int:
        """That have arrived, of all answers."""
        return sum(len(folder.token_ids) for folder in self._folders.values())

    def resuming(self, request: pb.GenerateRequest) -> pb.GenerateRequest:
        """The request that goes on from here: as it was, with what the server chose for it and what has arrived."""
        resuming = pb.GenerateRequest()
        resuming.CopyFrom(request)
        started = self._started.started
        if started.request_id:
            resuming.request_id = started.request_id
            resuming.numerics = started.numerics
            resuming.sampling.seed = started.seed
            resuming.speculation.verification_policy = started.verification_policy
        del resuming.resume[:]
        for sample_index, folder in sorted(self._folders.items()):
            resuming.resume.add(sample_index=sample_index, token_ids=folder.token_ids)
        return resuming

    def finish(self) -> list[GenerationResult]:
        """All results, by sample index; TandemError when the stream ended without one of them."""
        folders = (folder for _, folder in sorted(self._folders.items()))
        results = [folder.result for folder in folders if folder.result is not None]
        num_wanted = len(self._sample_indices)
        if len(results) < num_wanted:
            raise TandemError(
                "INTERNAL",
                f"the stream ended before the generation was complete: {len(results)} of {num_wanted} answers were",
            )
        return results

    def _folder(self, sample_index: int) -> ResultFolder:
        """The answer's, which begins with what was said for all."""
        if sample_index not in self._sample_indices:
            asked = self._sample_indices
            raise TandemError(
                "INTERNAL",
                f"the server sent an answer of sample index {sample_index}; asked were {asked.start}..{asked.stop - 1}",
            )
        folder = self._folders.get(sample_index)
        if folder is None:
            folder = self._folders[sample_index] = ResultFolder()
            folder.fold(self._started)
        return folder
