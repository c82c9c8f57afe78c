"""Sixteen requests that have nothing in common but the batch they are in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.client import GenerationResult

NUM_TOKENS = 10


@dataclass(frozen=True)
class Member:
    """One request; its options may refer to what its prompt gives without them, which has NUM_TOKENS tokens."""

    name: str
    options_of: Callable[[GenerationResult, int], dict[str, Any]]  # (without, vocabulary) -> what it adds
    changes_tokens: bool  # whether the options must give another answer


def _fixed(name: str, changes_tokens: bool, **options: Any) -> Member:
    return Member(name, lambda without, vocab_size: options, changes_tokens)


def _repeated(without: GenerationResult) -> list[int]:
    """Half of the answer's tokens, each once."""
    return sorted(set(without.token_ids[: NUM_TOKENS // 2]))


MEMBERS: Sequence[Member] = (
    _fixed("as it is", False),
    _fixed("greedy", False, temperature=0.0),
    _fixed(
        "seeded, top_k off, top_p, logprobs",
        False,
        seed=2**64 - 1,
        top_k=0,
        top_p=0.7,
        logprobs=True,
        top_logprobs=3,
    ),
    _fixed("unseeded, another sample index", False, seed=None, temperature=1.1, sample_index=5),
    _fixed("top_k 1", False, top_k=1),
    Member("top_k beyond the vocabulary", lambda _, vocab_size: {"top_k": vocab_size + 1}, False),
    _fixed("min_p", False, min_p=0.3),
    Member("bias +100", lambda without, _: {"logit_bias": {without.token_ids[-1]: 100.0}}, True),
    Member("bias -100", lambda without, _: {"logit_bias": {without.token_ids[0]: -100.0}}, True),
    _fixed("repetition up, presence up", False, repetition_penalty=5.0, presence_penalty=2.0),
    _fixed("repetition down, presence down", True, repetition_penalty=0.2, presence_penalty=-2.0),
    _fixed(
        "frequency up, processed logprobs", False, frequency_penalty=2.0, logprobs=True, logprobs_mode="processed"
    ),
    _fixed("frequency down", False, frequency_penalty=-2.0),
    Member(
        "min_tokens before an ending",
        lambda without, _: {"stop_token_ids": list(without.token_ids[1:3]), "min_tokens": 7},
        False,
    ),
    Member("a stop string", lambda without, _: {"stop": [without.text[4:7], "never"]}, True),
    Member(
        "allowed and bad tokens",
        lambda without, vocab_size: {
            "allowed_token_ids": [*_repeated(without), *range(0, vocab_size, 7)],
            "bad_token_ids": _repeated(without)[:1],
        },
        True,
    ),
)
