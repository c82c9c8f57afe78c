"""The selection rule over a vocabulary that lies in shards: each gives its winners, and only those travel.

A row costs a (value, index) pair a shard instead of its logits: 2 x shards numbers instead of V.
Letters: R rows, V vocabulary, S shards, each of consecutive ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.gumbel import NoiseKey
from tandem import rng


@dataclass(frozen=True, slots=True)
class ShardWinners:
    """The best token of each row among one shard's."""

    scores: npt.NDArray[np.float32]  # [R]
    token_ids: npt.NDArray[np.int64]  # [R], of the whole vocabulary


def shard_winners(logits: torch.Tensor, first_id: int, keys: Sequence[NoiseKey] | None = None) -> ShardWinners:
    """Of one shard's float32 logits [R, V / S], whose first column is token `first_id`.

    With `keys`, one a row, of logits plus that Gumbel noise, which each shard makes for its own tokens.
    """
    scores = logits.float().cpu().numpy()
    if keys is not None:
        ids = np.arange(first_id, first_id + scores.shape[1])
        noise = [rng.gumbel_at(key.seed, key.word, key.position, ids, key.sample_index) for key in keys]
        scores = scores + np.stack(noise)
    columns = scores.argmax(axis=-1)
    return ShardWinners(scores[np.arange(len(scores)), columns], first_id + columns.astype(np.int64))


def reduce_winners(winners: Sequence[ShardWinners]) -> npt.NDArray[np.int64]:
    """The token of each row -> int64 [R]: the largest score, the lowest id among equals, as `select` has it.

    `winners`: one a shard, the shards in the order of their ids.
    """
    scores = np.stack([winner.scores for winner in winners])  # [S, R]
    best = scores.argmax(axis=0)  # the first of equals is the shard with the lowest ids
    token_ids: npt.NDArray[np.int64] = np.stack([winner.token_ids for winner in winners])  # [S, R]
    reduced: npt.NDArray[np.int64] = token_ids[best, np.arange(scores.shape[1])]
    return reduced
