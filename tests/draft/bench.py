"""A draft service without wire or thread: the test moves its clock and says when a batch is computed and delivered."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from draft_service.limits import DraftLimits
from draft_service.proposers.base import ProposeInput, SessionKey
from draft_service.proposers.draft_model import DraftModelProposer
from draft_service.proposers.model_base import Drafting
from draft_service.service import DraftService, DraftStream, Result
from engine.backends.toy_backend import ToyEngine, hashed_logits
from tandem.types import Proposal, SessionSpec
from tests.draft.support import VOCAB, coupled_spec, make_spec

T = TypeVar("T")
LOGITS = hashed_logits(VOCAB)
_TURNS = 12  # of the loop, after which nothing moves any more


class StoppedLoop(asyncio.SelectorEventLoop):
    """Its clock stands still until it is moved."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


class HeldCompute:
    """In place of a `ComputeThread`: a batch is computed, and then delivered, when the test says so."""

    is_frozen = False

    def __init__(self) -> None:
        self.is_free = False  # nothing is held back
        self._go: asyncio.Event | None = None  # of what is held back now

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        await self._held()
        result = function(*args)
        await self._held()
        return result

    async def _held(self) -> None:
        if not self.is_free:
            self._go = asyncio.Event()
            await self._go.wait()
            self._go = None

    def go_on(self) -> None:
        """Let what is held back, if anything is, take its next step."""
        if self._go is not None:
            self._go.set()

    def close(self) -> None:
        """There is no thread."""


class RecordingProposer(DraftModelProposer):
    """Keeps each session's last input, and adds up what was wanted and not made."""

    def __init__(self, engine: ToyEngine, max_step_tokens: int, clock: Callable[[], float]) -> None:
        super().__init__(engine, drafting=Drafting(max_step_tokens, clock=clock))
        self.inputs: dict[SessionKey, ProposeInput] = {}
        self.num_missing = 0

    def propose(self, batch: Sequence[ProposeInput]) -> list[Proposal | None]:
        answers = super().propose(batch)
        for item, answer in zip(batch, answers, strict=True):
            self.inputs[item.session_key] = item
            if answer is not None:
                self.num_missing += self._num_wanted(item) - len(answer.draft_token_ids)
        return answers


class Bench:
    """One service and its engine, on a loop that turns only when it is told to."""

    def __init__(self, engine: ToyEngine, limits: DraftLimits, max_step_tokens: int) -> None:
        self.loop = StoppedLoop()
        self.engine = engine
        self.proposer = RecordingProposer(engine, max_step_tokens, self.loop.time)
        self.service: DraftService
        self.compute: HeldCompute
        self._run(self._start(limits))

    async def _start(self, limits: DraftLimits) -> None:
        self.compute = HeldCompute()
        self.service = DraftService(self.proposer, limits, self.compute)  # type: ignore[arg-type]

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """The function's result, on the loop."""

        async def called() -> T:
            return function(*args)

        return self._run(called())

    def results_of(self, stream: DraftStream, function: Callable[..., None], *args: Any) -> list[Result]:
        """What an item is answered at once."""
        assert stream.outbox._results == []
        self.call(function, *args)
        return taken(stream)

    def turn(self) -> None:
        """Let the loop do whatever it can."""

        async def turns() -> None:
            for _ in range(_TURNS):
                await asyncio.sleep(0)

        self._run(turns())

    def settle(self) -> None:
        """Compute and deliver everything; fails when there is no end to it."""
        self.compute.is_free = True
        self.compute.go_on()
        for _ in range(1000):
            self.turn()
            worker = self.service.batcher._worker
            if worker is None or worker.done():
                break
        else:
            raise AssertionError("there is no end to it")
        self.compute.is_free = False

    def check_rows(self) -> None:
        """Each session's are those of a prefill of what it last drafted from, or of the start of it."""
        for key, sequence in self.proposer.kv._sequences.items():
            rows = self.engine.token_ids(sequence.sequence_id)
            assert rows == sequence.token_ids
            item = self.proposer.inputs[key]
            kind = "coupled" if item.spec.sampling.temperature else "greedy"
            drafts = free_drafts(kind, item.spec.token_ids, tuple(item.committed_token_ids), item.num_draft_tokens)
            assert [*item.committed_token_ids, *drafts][: len(rows)] == rows

    def check_accounting(self) -> None:
        """Every block is free, cached or listed by a session; every draft that is missing is counted."""
        usage = self.engine.kv_usage()
        assert usage.free_blocks + usage.used_blocks + usage.cached_blocks == usage.total_blocks
        tables = [self.engine._sequences.table(number) for number in self.engine.sequence_ids]
        assert usage.used_blocks == len({block_id for table in tables for block_id in table.block_ids})
        assert len(tables) == len(self.proposer.kv._sequences)
        assert self.proposer.kv_usage().shrunk_draft_tokens == self.proposer.num_missing

    def check_load(self) -> None:
        """The load says what the engine says, once nothing is in work."""
        load, usage = self.service.load, self.engine.kv_usage()
        assert (load.total_blocks, load.used_blocks, load.cached_blocks, load.evicted_blocks, load.hit_blocks) == (
            usage.total_blocks,
            usage.used_blocks,
            usage.cached_blocks,
            usage.evicted_blocks,
            usage.hit_blocks,
        )
        assert load.kv_usage == usage.used_blocks / usage.total_blocks
        assert load.shrunk_draft_tokens == self.proposer.num_missing
        assert load.waiting == 0

    def close(self) -> None:
        self.loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)


def taken(stream: DraftStream) -> list[Result]:
    """The results in a stream's outbox, which is empty then."""
    results, stream.outbox._results = list(stream.outbox._results), []
    return results


SPECS = {"greedy": make_spec, "coupled": coupled_spec}


@lru_cache(maxsize=1 << 14)
def free_drafts(kind: str, prompt: tuple[int, ...], committed: tuple[int, ...], k: int) -> tuple[int, ...]:
    """What is drafted where nothing is short."""
    proposer = DraftModelProposer(ToyEngine(LOGITS, VOCAB, num_blocks=64))
    spec: SessionSpec = SPECS[kind](prompt)
    (proposal,) = proposer.propose([ProposeInput(SessionKey(1), spec, committed, k)])
    assert proposal is not None
    return proposal.draft_token_ids
