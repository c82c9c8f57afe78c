"""In-memory doubles of the draft and the target, and sequences to run them on."""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from orchestrator.sequence import Sequence
from orchestrator.text_stream import TextStream
from tandem.types import (
    FinishReason,
    LogprobsOptions,
    Proposal,
    SamplingParams,
    SessionSpec,
    TokenLogprobs,
    Verdict,
)
from tandem.vocabulary import Vocabulary

LETTERS = Vocabulary.toy(64)  # ids 0.. are a, b, c, ...
BYTES = Vocabulary.toy(257)  # ids 0..255 are bytes, 256 ends a sequence
# Tokens of several characters, halves of characters, a leading space to strip, and a special token.
PIECES = Vocabulary(
    bytes_table=(
        b" a",
        b"b",
        b"ab",
        b"bca",
        b" ",
        b"  ",
        b"\xf0\x9f",
        b"\x94\xa5",
        b"\xe4",
        b"\xb8\x96",
        b"c",
        b"</s>",
    ),
    special_ids=frozenset({11}),
    eos_token_ids=(11,),
    bos_token_id=None,
    add_bos=False,
    strips_leading_space=True,
    encode_verbatim=lambda _: [],
    chat_template=None,
)
PROMPT = (0, 1, 2)


def make_sequence(
    *,
    vocabulary: Vocabulary = LETTERS,
    prompt: Tokens[int] = PROMPT,
    max_tokens: int = 20,
    min_tokens: int = 0,
    stops: Tokens[str] = (),
    include_stop: bool = False,
    stop_token_ids: Tokens[int] = (),
    eos: Tokens[int] = (63,),
    logprobs: LogprobsOptions | None = None,
    k: int = 4,
    clock: Callable[[], float] = lambda: 0.0,
) -> Sequence:
    spec = SessionSpec(
        token_ids=tuple(prompt),
        prompt_len=len(prompt),
        sampling=SamplingParams(temperature=0.0, seed=0),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=frozenset(stop_token_ids),
        eos_token_ids=frozenset(eos),
        logprobs=logprobs,
    )
    text = TextStream(vocabulary, stops, include_stop)
    return Sequence(spec, text, num_draft_tokens=k, vocab_size=vocabulary.vocab_size, clock=clock)


def letters(text: str) -> list[int]:
    """The ids of `text` in LETTERS."""
    return LETTERS.encode(text)


@dataclass
class ScriptedVerifier:
    """A target whose plain output is the script, whatever is proposed."""

    script: Tokens[int]
    log: list[str] = field(default_factory=list)
    fail_at_round: int | None = None

    def open(self, sequence: Sequence) -> None:
        self.log.append("open")

    async def verify(self, sequence: Sequence, proposal: Proposal) -> Verdict:
        if sequence.round == self.fail_at_round:
            raise ConnectionError("the target is gone")
        self.log.append("verify")
        return verdict_of(self.script, sequence, proposal.draft_token_ids)

    def close(self, sequence: Sequence) -> None:
        self.log.append("close")


def verdict_of(script: Tokens[int], sequence: Sequence, drafts: Tokens[int]) -> Verdict:
    """What a greedy target with this plain output decides about the drafts."""
    start = sequence.num_completion_tokens
    spec = sequence.session_spec()
    token_ids: list[int] = []
    num_accepted = 0
    finish: FinishReason | None = None
    for draft in (*drafts, None):
        index = start + len(token_ids)
        token_ids.append(script[index])
        num_accepted += draft == script[index]
        if script[index] in spec.ending_token_ids and index >= spec.min_tokens:
            finish = FinishReason.STOP
        elif index + 1 == spec.max_tokens:
            finish = FinishReason.LENGTH
        if finish is not None or draft != script[index]:
            break
    # No two entries of an output are alike.
    logprobs = [TokenLogprobs(-1.0 - start - index, 1) for index in range(len(token_ids) if spec.logprobs else 0)]
    return Verdict(len(drafts), num_accepted, tuple(token_ids), finish, logprobs=tuple(logprobs))


@dataclass
class ScriptedProposer:
    """A draft whose proposals are computed from the output so far."""

    drafts_of: Callable[[int, int], Tokens[int]]  # (index of the next output token, K) -> drafts
    log: list[str] = field(default_factory=list)

    async def propose(self, sequence: Sequence) -> Proposal:
        self.log.append("propose")
        return Proposal(tuple(self.drafts_of(sequence.num_completion_tokens, sequence.num_draft_tokens())))

    def close(self, sequence: Sequence) -> None:
        self.log.append("close")


async def until(condition: Callable[[], bool], limit_s: float = 20) -> None:
    """Until it holds; TimeoutError when it does not come to that."""

    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), limit_s)
