"""Ends of every kind through the three services: scripted outputs, drafts that are right, wrong, or an early end."""

import asyncio
import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from engine.backends.toy_backend import ToyEngine, hashed_logits, scripted_logits
from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rng import F32
from tandem.serving.channels import open_channel
from tandem.types import FinishReason, SamplingParams, SessionSpec
from tandem.vocabulary import Vocabulary
from tests.identity.plain import answer_of, plain_tokens
from tests.identity.proposers import MadeUp, random_drafts
from tests.identity.streams import Streamed, StreamedAnswer
from tests.orchestrator.fakes import BYTES, LETTERS
from tests.orchestrator.services import all_services, self_draft, toy_engine

NUM_REQUESTS = 200
NUM_TOKENS = 24
PROMPT_LEN = 2


class Scripts:
    """Every prompt of two tokens has its own output, of a few characters that come again and again."""

    def __init__(self, vocabulary: Vocabulary, parts: Sequence[str]) -> None:
        self.vocabulary = vocabulary
        self._parts = [vocabulary.encode(part) for part in parts] + [list(vocabulary.eos_token_ids)]
        self.of = functools.cache(self._of)

    def _of(self, prompt: tuple[int, ...]) -> list[int]:
        """NUM_TOKENS tokens; the last character may be cut, and one in 15 is a broken one."""
        rng = random.Random(repr(prompt))
        script: list[int] = []
        while len(script) < NUM_TOKENS:
            part = rng.choice(self._parts)
            script += part[: len(part) - (rng.random() < 1 / 15)]
        return script[:NUM_TOKENS]

    def logits_of(self, token_ids: Sequence[int]) -> F32:
        script = self.of(tuple(token_ids[:PROMPT_LEN]))
        return scripted_logits(script, self.vocabulary.vocab_size, start=PROMPT_LEN)(token_ids)

    def drafts_of(self, token_ids: Sequence[int], num_wanted: int) -> list[int]:
        """Some right ones, then the end of the sequence again and again."""
        start, num_right = len(token_ids) - PROMPT_LEN, len(token_ids) * 7 % (num_wanted + 1)
        right = self.of(tuple(token_ids[:PROMPT_LEN]))[start : start + num_right]
        return [*right, *self.vocabulary.eos_token_ids * (num_wanted - len(right))]

    def request(self, number: int) -> pb.GenerateRequest:
        """A request that may end in any way."""
        rng = random.Random(number)
        prompt = (number // 50, number % 50)
        script = self.of(prompt)
        text = self.vocabulary.decode(script, at_start=False)
        starts = [rng.randrange(len(text)) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
        stopping = pb.StoppingCriteria(
            max_tokens=rng.randint(1, NUM_TOKENS),
            stop=[text[start:][: rng.randint(1, 6)] + rng.choice(("", "", "z")) for start in starts],
            stop_token_ids=rng.sample(script, rng.choice((0, 0, 0, 1))),
            ignore_eos=rng.random() < 0.3,
            include_stop_in_output=rng.random() < 0.5,
        )
        stopping.min_tokens = rng.choice((0, 0, rng.randint(0, min(8, stopping.max_tokens))))
        return pb.GenerateRequest(
            tokens=pb.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(temperature=0.0),
            stopping=stopping,
            speculation=pb.SpeculationOptions(num_draft_tokens=rng.choice((0, 1, 4, 8, 16))),
        )

    def check(self, request: pb.GenerateRequest, answer: StreamedAnswer) -> None:
        """Against the reference."""
        stopping, prompt = request.stopping, tuple(request.tokens.ids)
        spec = SessionSpec(
            prompt,
            PROMPT_LEN,
            SamplingParams(temperature=0.0, seed=0),
            stopping.max_tokens,
            stopping.min_tokens,
            frozenset(stopping.stop_token_ids),
            frozenset() if stopping.ignore_eos else frozenset(self.vocabulary.eos_token_ids),
        )
        stops, include_stop = list(stopping.stop), stopping.include_stop_in_output
        expected = answer_of(plain_tokens(spec, self.logits_of), spec, self.vocabulary, stops, include_stop)
        answer.check(expected, self.vocabulary, stops)


@pytest.mark.parametrize(
    "scripts",
    [Scripts(LETTERS, list("abc ")), Scripts(BYTES, ["a", "b", " ", "🔥", "世", "é", "ab"])],
    ids=["letters", "bytes"],
)
def test_every_answer_ends_where_its_tokens_say_whatever_is_drafted(scripts: Scripts) -> None:
    async def scenario() -> None:
        vocabulary = scripts.vocabulary
        engine = ToyEngine(scripts.logits_of, vocabulary.vocab_size)
        async with (
            all_services(lambda: MadeUp(scripts.drafts_of), engine, vocabulary=vocabulary) as stack,
            open_channel(stack.client.address) as channel,
        ):
            generate: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate
            requests = [scripts.request(number) for number in range(NUM_REQUESTS)]
            streams = [Streamed() for _ in requests]
            ended = await asyncio.gather(
                *(stream.read(generate(request)) for request, stream in zip(requests, streams, strict=True))
            )
            assert all(ended)
            answers = [stream.answers[0] for stream in streams]
            for request, answer in zip(requests, answers, strict=True):
                scripts.check(request, answer)
            reasons = [type(answer.answer.matched_stop) for answer in answers]
            assert min(reasons.count(kind) for kind in (str, int, type(None))) > NUM_REQUESTS / 10
            await stack.until_idle()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_drafts_past_the_end_of_the_context_are_left_out_and_the_answer_has_its_last_token() -> None:
    async def scenario() -> None:
        async with all_services(self_draft, toy_engine(max_context=64)) as stack:
            for prompt_len in range(56, 64):
                result = await stack.client.complete("a" * prompt_len, num_draft_tokens=16, ignore_eos=True)
                assert result.num_completion_tokens == 64 - prompt_len
                assert result.finish_reason is FinishReason.LENGTH
                assert result.speculation.acceptance_rate == (1.0 if prompt_len < 63 else None)

    asyncio.run(scenario())


def test_an_answer_of_broken_characters_is_whole_and_its_neighbours_notice_nothing() -> None:
    async def scenario() -> None:
        vocabulary = Vocabulary.toy(257)
        engine = ToyEngine(hashed_logits(257, seed=3), 257)
        async with all_services(lambda: random_drafts(257), engine, vocabulary=vocabulary) as stack:
            calm = [{"prompt": f"{n}", "temperature": 0.0, "max_tokens": 30} for n in range(8)]
            alone = [await stack.client.complete(**options) for options in calm]
            wild = asyncio.create_task(
                stack.client.complete("wild", temperature=5.0, seed=1, max_tokens=300, ignore_eos=True)
            )
            together = await asyncio.gather(*(stack.client.complete(**options) for options in calm))
            assert [result.text for result in together] == [result.text for result in alone]
            result = await wild
            assert result.text == vocabulary.decode(result.token_ids)
            assert result.text.count("\ufffd") > 100

    asyncio.run(scenario())
