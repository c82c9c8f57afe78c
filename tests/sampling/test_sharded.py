"""Winners of shards, reduced, are the winners of the whole vocabulary, ties and noise included."""

import itertools

import numpy as np
import pytest
import torch

from engine.sampling.gumbel import NoiseKey, gumbel_argmax
from engine.sampling.sampler import select
from engine.sampling.sharded import reduce_winners, shard_winners
from tandem import rng
from tandem.rng import Stream

V, R = 1000, 40
WORD = rng.stream_word(Stream.TARGET, 7, None)


def logits(seed: int, levels: int) -> torch.Tensor:
    """Few levels make many ties."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(levels, (R, V), generator=generator).float() / 4


@pytest.mark.parametrize("num_shards", [1, 2, 7])
@pytest.mark.parametrize("levels", [3, 100_000])
def test_the_argmax_of_the_shards_is_the_argmax_of_all(num_shards: int, levels: int) -> None:
    whole = logits(num_shards, levels)
    bounds = np.linspace(0, V, num_shards + 1).astype(int)
    winners = [shard_winners(whole[:, a:b], int(a)) for a, b in itertools.pairwise(bounds)]
    assert reduce_winners(winners).tolist() == select(whole).tolist()


def test_with_noise_the_shards_choose_what_the_whole_vocabulary_does() -> None:
    whole = logits(3, 40)
    keys = [NoiseKey(11, WORD, position, 0) for position in range(R)]
    winners = [shard_winners(part, first, keys) for first, part in ((0, whole[:, :256]), (256, whole[:, 256:]))]
    expected = [gumbel_argmax(row.numpy(), key) for row, key in zip(whole, keys, strict=True)]
    assert reduce_winners(winners).tolist() == expected
    assert expected != select(whole).tolist()


def test_what_travels_is_a_pair_a_row_and_shard() -> None:
    winners = shard_winners(logits(1, 9), 500)
    assert winners.scores.shape == winners.token_ids.shape == (R,)
    assert winners.token_ids.min() >= 500
