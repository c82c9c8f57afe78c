"""Rejection rounds of one draft at many positions in one sweep; a test holds it to the real policy's tokens."""

import numpy as np

from tandem import rng
from tandem.rng import F32, F64, Stream
from tests.sampling.helpers import Probs

FIRST_POSITION = 3  # the prompt's length: position n is decided by a round of its own, with base n


def noise(seed: int, stream: Stream, num_rounds: int, vocab_size: int) -> F32:
    """Gumbel noise of the stream at each round's first position -> [N, V]."""
    return rng.gumbel_from_bits(_bits(seed, stream, num_rounds, vocab_size))


def _bits(seed: int, stream: Stream, num_rounds: int, vocab_size: int) -> rng.U32:
    positions = np.arange(FIRST_POSITION, FIRST_POSITION + num_rounds)
    word = rng.stream_word(stream, FIRST_POSITION, FIRST_POSITION)  # the same for every round's first draft
    num_blocks = (vocab_size + 3) // 4
    blocks = [rng.philox4x32((block, positions, 0, word), seed) for block in range(num_blocks)]
    return np.asarray(np.concatenate(blocks, axis=1)[:, :vocab_size])


def uniforms(seed: int, num_rounds: int) -> F64:
    """The ACCEPT uniform of each round's first draft -> [N]."""
    return rng.uniform_from_bits(_bits(seed, Stream.ACCEPT, num_rounds, 1)[:, 0])


def sampled_drafts(q: Probs, seed: int, num_rounds: int) -> np.ndarray:
    """What an honest drafter proposes in each round -> [N]."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.argmax(np.log(q) + noise(seed, Stream.DRAFT, num_rounds, q.size), axis=1))


def verify_first_drafts(p: Probs, q: Probs, drafts: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Whether each round's draft [N] stands, and the token it decides [N]; q is [V], or [N, V] one a round."""
    q_rows = np.broadcast_to(q, (drafts.size, p.size))
    of_draft = np.take_along_axis(q_rows, drafts[:, None], axis=1)[:, 0]
    accepted = uniforms(seed, drafts.size) < p[drafts] / of_draft
    with np.errstate(divide="ignore"):
        scores = np.log(np.maximum(p - q_rows, 0.0)) + noise(seed, Stream.RESIDUAL, drafts.size, p.size)
    return accepted, np.where(accepted, drafts, np.argmax(scores, axis=1))
