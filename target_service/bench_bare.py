"""The bare side of `tandem bench target`: all sequences stepped together by an engine, with nothing around it.

Letters: N sequences, K drafts of a round.
"""

import time
from collections.abc import Sequence

import torch

from engine.backends.base import SequenceInput, SpeculativeEngine
from tandem.defaults import MAX_STEP_TOKENS


class BareSequences:
    """Greedy decoding of some prompts; `tokens` grow with every step.

    The drafts of a round repeat the last token, K times: whoever steps the same batch knows them too.
    """

    def __init__(self, engine: SpeculativeEngine, prompts: Sequence[Sequence[int]], num_drafts: int) -> None:
        """Prefills all but the last token of each prompt."""
        self.tokens = [list(prompt) for prompt in prompts]
        self._engine = engine
        self._num_drafts = num_drafts
        self._sequence_ids = [engine.create() for _ in prompts]
        for sequence_id, prompt in zip(self._sequence_ids, prompts, strict=True):
            for start in range(0, len(prompt) - 1, MAX_STEP_TOKENS):
                chunk = prompt[start : min(start + MAX_STEP_TOKENS, len(prompt) - 1)]
                engine.advance([SequenceInput(sequence_id, chunk)])

    @torch.inference_mode()
    def run(self, num_rounds: int) -> float:
        """That many steps -> seconds of one."""
        start = time.perf_counter()
        for _ in range(num_rounds):
            self._step()
        return (time.perf_counter() - start) / num_rounds

    def release(self) -> None:
        """Give the memory back."""
        for sequence_id in self._sequence_ids:
            self._engine.release(sequence_id)

    def _step(self) -> None:
        """One forward; keep what is right, roll back the rest."""
        width = 1 + self._num_drafts
        inputs = [
            SequenceInput(sequence_id, tokens[-1:] * width, width)
            for sequence_id, tokens in zip(self._sequence_ids, self.tokens, strict=True)
        ]
        argmax = self._engine.forward_per_position_argmax(inputs).tolist()
        for index, tokens in enumerate(self.tokens):
            # [K+1]
            row = argmax[index * width : (index + 1) * width]
            num_accepted = _num_leading(row[:-1], tokens[-1])
            tokens += row[: num_accepted + 1]
            if num_accepted < self._num_drafts:
                self._engine.truncate(self._sequence_ids[index], len(tokens) - 1)


def _num_leading(token_ids: Sequence[int], draft_token_id: int) -> int:
    """How many of the first ones are the draft."""
    num_leading = 0
    while num_leading < len(token_ids) and token_ids[num_leading] == draft_token_id:
        num_leading += 1
    return num_leading
