"""What every backend with paged memory does alike: its sequences are `KvSequences`."""

from collections.abc import Sequence

from engine.backends.base import EngineCapabilities, EngineError, KvUsage, SequenceId, SequenceInput
from engine.kv.sequences import KvSequences


class PagedEngine:
    """The part of `SpeculativeEngine` that concerns no forward."""

    def __init__(self, capabilities: EngineCapabilities, sequences: KvSequences) -> None:
        self._capabilities = capabilities
        self._sequences = sequences

    @property
    def capabilities(self) -> EngineCapabilities:
        """See `SpeculativeEngine`."""
        return self._capabilities

    def create(self, token_ids: Sequence[int] = ()) -> SequenceId:
        """See `SpeculativeEngine`."""
        return self._sequences.create(token_ids)

    def num_cached_tokens(self, sequence_id: SequenceId) -> int:
        """See `SpeculativeEngine`."""
        return self._sequences.table(sequence_id).num_tokens

    def truncate(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """See `SpeculativeEngine`."""
        self._sequences.truncate(sequence_id, num_tokens)

    def fork(self, sequence_id: SequenceId) -> SequenceId:
        """See `SpeculativeEngine`."""
        return self._sequences.fork(sequence_id)

    def release(self, sequence_id: SequenceId) -> None:
        """See `SpeculativeEngine`."""
        self._sequences.release(sequence_id)

    def kv_usage(self) -> KvUsage:
        """See `SpeculativeEngine`."""
        return self._sequences.usage()

    def num_blocks_for(self, inputs: Sequence[SequenceInput]) -> int:
        """See `SpeculativeEngine`."""
        return self._sequences.num_blocks_for(inputs)


def check_advance(inputs: Sequence[SequenceInput]) -> None:
    """EngineError for an input of `advance` that wants logits."""
    for item in inputs:
        if item.num_logits_rows:
            raise EngineError(
                f"sequence {item.sequence_id}: advance computes no logits, num_logits_rows must be 0, "
                f"got {item.num_logits_rows}"
            )
