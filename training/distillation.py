"""Training a head by distillation from what its target computed, and its acceptance on text that it was not trained on.

Letters: B documents, N tokens of each, T = N - 1 anchors, L layers of the target, E hidden size, U ids of the reduced
vocabulary.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from engine.models.config import LoadedModel
from tandem.ngram_index import NgramIndex
from training.corpus import Corpus
from training.target_parts import TargetParts


class HeadModule(Protocol):
    """A head while it is trained: an `nn.Module` with these besides."""

    def begin_as(self, target: LoadedModel, parts: TargetParts) -> None:
        """Start from the target's own weights."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the head that serves is built from."""
        ...

    def unroll(self, parts: TargetParts, batch: "Batch", num_steps: int) -> Iterator[torch.Tensor]:
        """Normed states [B, T, E] of each step.

        Step j, from 0, at anchor t: the tokens up to t + 1 + j are given, and `TargetParts.logits` of the state are for
        token t + 2 + j. Anchors whose tokens run past the end are given whatever tokens there are.
        """
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents of about the same length, padded behind."""

    token_ids: torch.Tensor  # int64 [B, N]
    states: torch.Tensor  # float32 [B, N, L, E]
    recurring: torch.Tensor  # int64 [B, N]: the token of each token's `Recurrence`
    sizes: torch.Tensor  # int64 [B, N]: of its n-gram
    is_answer: torch.Tensor  # bool [B, N]: the target wrote the token


def read(corpus: Corpus, documents: Sequence[int]) -> Batch:
    """These documents as one batch."""
    lengths = [int(corpus.starts[number + 1] - corpus.starts[number]) for number in documents]
    longest, num_layers, hidden = max(lengths), *corpus.hidden.shape[1:]
    token_ids = torch.zeros(len(documents), longest, dtype=torch.int64)
    states = torch.zeros(len(documents), longest, num_layers, hidden)
    is_answer = torch.zeros(len(documents), longest, dtype=torch.bool)
    recurring, sizes = torch.zeros_like(token_ids), torch.zeros_like(token_ids)
    for row, (number, length) in enumerate(zip(documents, lengths, strict=True)):
        start = int(corpus.starts[number])
        token_ids[row, :length] = torch.from_numpy(corpus.token_ids[start : start + length].astype(np.int64))
        states[row, :length] = corpus.states(start, start + length).float()
        is_answer[row, int(corpus.prompt_lens[number]) : length] = True
        index = NgramIndex()
        for token_id in token_ids[row, :length].tolist():
            index.append(token_id)
        recurring[row, :length] = torch.tensor([one.token_id for one in index.recurrences])
        sizes[row, :length] = torch.tensor([one.size for one in index.recurrences])
    return Batch(token_ids, states, recurring, sizes, is_answer)


def held_out(corpus: Corpus, num_documents: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Random documents to measure on, and those to train on: none that has a prompt with the former in common."""
    numbers = list(range(len(corpus)))
    rng.shuffle(numbers)
    measured = numbers[:num_documents]
    prompts = {corpus.prompt(number) for number in measured}
    return measured, [number for number in numbers[num_documents:] if corpus.prompt(number) not in prompts]


def batches(corpus: Corpus, documents: Sequence[int], max_tokens: int, rng: random.Random) -> Iterator[list[int]]:
    """One pass over the documents in batches of at most `max_tokens`, padding included, in random order."""
    lengths = corpus.starts[1:] - corpus.starts[:-1]
    ordered = sorted(documents, key=lambda number: (int(lengths[number]), rng.random()))
    made: list[list[int]] = [[]]
    for number in ordered:
        if made[-1] and (len(made[-1]) + 1) * int(lengths[number]) > max_tokens:
            made.append([])
        made[-1].append(number)
    rng.shuffle(made)
    yield from made


def reduced_vocabulary(corpus: Corpus, documents: Sequence[int], size: int) -> torch.Tensor:
    """The ids that occur most often in these documents' answers, int64 [U], ascending."""
    counts: Counter[int] = Counter()
    for number in documents:
        start, end = int(corpus.starts[number]), int(corpus.starts[number + 1])
        counts.update(corpus.token_ids[start + int(corpus.prompt_lens[number]) : end].tolist())
    return torch.tensor(sorted(token_id for token_id, _ in counts.most_common(size)))


def losses(head: HeadModule, parts: TargetParts, batch: Batch, num_steps: int) -> Iterator[torch.Tensor]:
    """Cross-entropy with the target's distribution over the reduced vocabulary, mean over answers, for each step."""
    is_wanted = batch.is_answer[:, 1:]  # [B, T]: whether row t decides a token that the target wrote
    with torch.no_grad():
        probs = parts.probs(batch.states[:, :-1, -1][is_wanted])
        place = is_wanted.flatten().cumsum(0).view_as(is_wanted) - 1  # of a row among `probs`
    for step, normed in enumerate(head.unroll(parts, batch, num_steps)):
        num_anchors = is_wanted.shape[1] - 1 - step
        if num_anchors < 1:
            return
        # Anchor t of this step drafts what row t + 1 + step decides.
        wanted = is_wanted[:, 1 + step :]
        drafted = F.log_softmax(parts.logits(normed[:, :num_anchors][wanted]).float(), dim=-1)
        yield -(probs[place[:, 1 + step :][wanted]] * drafted).sum(-1).mean()


@torch.no_grad()
def acceptance(
    head: HeadModule, parts: TargetParts, corpus: Corpus, documents: Sequence[int], num_steps: int
) -> list[float]:
    """Of greedily drafted tokens, the share that the text goes on with, by position, given those before were right.

    Every anchor of every answer counts as a round; drafts are the head's own until the first wrong one, and what is
    drafted after that does not count, so giving it the text's own tokens is the same.
    """
    right, tried = [0] * num_steps, [0] * num_steps
    rng = random.Random(0)
    for numbers in batches(corpus, documents, 2048, rng):
        batch = read(corpus, numbers)
        next_ids = batch.token_ids[:, 1:]
        is_right = torch.ones_like(next_ids, dtype=torch.bool)
        for step, normed in enumerate(head.unroll(parts, batch, num_steps)):
            num_anchors = next_ids.shape[1] - 1 - step
            wanted = batch.is_answer[:, 2 + step :] & is_right[:, :num_anchors]
            drafts = parts.ids[parts.logits(normed[:, :num_anchors][wanted]).argmax(dim=-1)]
            is_right = wanted.masked_scatter(wanted, drafts == batch.token_ids[:, 2 + step :][wanted])
            tried[step] += int(wanted.sum())
            right[step] += int(is_right.sum())
    return [number / max(1, of) for number, of in zip(right, tried, strict=True)]


def mean_acceptance_length(rates: Sequence[float]) -> float:
    """Tokens of a round: the accepted drafts and the target's own."""
    return 1.0 + sum(math.prod(rates[: index + 1]) for index in range(len(rates)))
