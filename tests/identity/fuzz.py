"""Random requests with good and bad values in every field, each knowing which of its fields are bad."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.vocabulary import Vocabulary

NAN, INF = float("nan"), float("inf")
MOST_UINT32 = 2**32 - 1
MAX_CONTEXT = 64
MAX_PROMPT = 20  # tokens of a good one; a byte each
MAX_TOKENS = 5

# Float fields of sampling: good values, the limits among them, and bad ones.
_FLOATS: dict[str, tuple[Sequence[float], Sequence[float]]] = {
    "temperature": (
        (0.0, 1e-45, 1e-6, 1e-5, 2e-5, 1e-3, 0.3, 0.7, 1.0, 1.5, 5.0, 100.0),
        (-1e-45, -1.0, 100.1, NAN, INF, -INF),
    ),
    "top_p": ((1e-45, 1e-3, 0.3, 0.9, 0.999, 1.0), (0.0, -0.1, 1.001, NAN, INF)),
    "min_p": ((0.0, 1e-45, 0.05, 0.5, 1.0), (-1e-3, 1.1, NAN, INF)),
    "repetition_penalty": ((0.01, 0.5, 1.0, 1.3, 10.0), (0.0, -1.0, 0.0099, 10.1, NAN, INF)),
    "presence_penalty": ((-2.0, -0.5, 0.0, 0.5, 2.0), (-2.1, 2.1, NAN, -INF)),
    "frequency_penalty": ((-2.0, -0.5, 0.0, 0.5, 2.0), (-3.0, 1e30, NAN, INF)),
}
# Transports by policy, unless the temperature makes it greedy.
_USABLE = {
    common_pb2.VERIFICATION_POLICY_UNSPECIFIED: ("COUPLED", "ONE_HOT"),
    common_pb2.VERIFICATION_POLICY_REJECTION: ("SPARSE", "FULL", "ONE_HOT"),
    common_pb2.VERIFICATION_POLICY_BLOCK: ("SPARSE", "FULL", "ONE_HOT"),
}


@dataclass
class Drawn:
    """A request, and what must become of it."""

    request: pb.GenerateRequest = field(default_factory=pb.GenerateRequest)
    bad_fields: set[str] = field(default_factory=set)  # of which one must be refused by name
    num_chunks: int | None = None  # after so many the client leaves
    timeout_s: float | None = None


class RequestMaker:
    """Draws requests for one vocabulary; the same ones for the same seed."""

    def __init__(self, seed: int, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._random = random.Random(seed)
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size  # the target's

    def draw(self) -> Drawn:
        """One request; about one in three is bad."""
        drawn = Drawn()
        self._draw_prompt(drawn)
        self._draw_sampling(drawn)
        self._draw_stopping(drawn)
        self._draw_speculation(drawn)
        self._draw_answers(drawn)
        if self._one_in(20):
            drawn.request.request_id = self._pick(
                drawn, "request_id", ("mine", "é" * 128), ("x" * 129, "y" * 10_000)
            )
        if self._one_in(12):
            drawn.num_chunks = self._random.randrange(3)
        if self._one_in(25):
            drawn.timeout_s = self._random.choice((0.0, 0.002, 0.02, 0.1))
        return drawn

    def _one_in(self, count: int) -> bool:
        return self._random.randrange(count) == 0

    def _pick(self, drawn: Drawn, name: str, good: Sequence[Any], bad: Sequence[Any], one_in: int = 40) -> Any:
        """Mostly a good value."""
        if bad and self._one_in(one_in):
            drawn.bad_fields.add(name)
            return self._random.choice(bad)
        return self._random.choice(good)

    def _token_id(self) -> int:
        return self._random.randrange(self._vocab_size)

    def _token_ids(self, most: int) -> list[int]:
        return [self._token_id() for _ in range(self._random.randint(1, most))]

    def _bad_ids(self) -> list[int]:
        outside = self._random.choice((self._vocab_size, 2**31, MOST_UINT32))
        return self._random.choice(([outside], [*self._token_ids(3), outside]))

    def _draw_prompt(self, drawn: Drawn) -> None:
        request, kind = drawn.request, self._random.choice(("text", "tokens", "tokens", "chat"))
        if self._one_in(200):
            drawn.bad_fields.add("prompt")  # there is none
        elif kind == "text":
            request.text = self._pick(drawn, "text", [self._text()], ("", "a" * MAX_CONTEXT, "a" * 100_000))
        elif kind == "tokens":
            request.tokens.SetInParent()
            if self._one_in(40):
                drawn.bad_fields.add("prompt")
                request.tokens.ids.extend(self._bad_ids())
            else:
                good, bad = self._token_ids(MAX_PROMPT), ([], [0] * MAX_CONTEXT)
                request.tokens.ids.extend(self._pick(drawn, "tokens", [good], bad))
        else:
            self._draw_chat(drawn)

    def _draw_chat(self, drawn: Drawn) -> None:
        """The toy's template is `role: content` a line; an alphabet without colon cannot take it."""
        drawn.request.chat.SetInParent()
        bad = ("empty", "role", "long")
        what = self._pick(drawn, "chat", ["fine"], bad)
        role, content = "user", self._text()[:4]
        if what == "role":
            role = self._random.choice(("", "alien", "USER"))
        if what == "long":
            content = "a" * MAX_CONTEXT
        if what != "empty":
            drawn.request.chat.messages.add(role=role, content=content)
        if b":" not in self._vocabulary.bytes_table:
            drawn.bad_fields.add("chat")

    def _text(self) -> str:
        """At least one character, of at most MAX_PROMPT tokens together."""
        alphabet = "abc XYZ 019"
        if len(self._vocabulary.bytes_table) > 256:
            alphabet += "é世🔥\ufffd\u200d\n\0"
        length = self._random.randint(1, MAX_PROMPT // 4)
        return "".join(self._random.choice(alphabet) for _ in range(length))

    def _draw_sampling(self, drawn: Drawn) -> None:
        sampling = drawn.request.sampling
        for name, (good, bad) in _FLOATS.items():
            if self._one_in(2 if name == "temperature" else 5):
                setattr(sampling, name, self._pick(drawn, f"sampling.{name}", good, bad))
        if self._one_in(5):
            good_k = (0, 1, 2, 5, self._vocab_size, self._vocab_size + 1, 2**31 - 1)
            sampling.top_k = self._pick(drawn, "sampling.top_k", good_k, (2**31, MOST_UINT32))
        if not self._one_in(5):
            sampling.seed = self._random.choice((0, 1, 2**63, 2**64 - 1, self._random.getrandbits(64)))
        self._draw_token_sets(drawn)

    def _draw_token_sets(self, drawn: Drawn) -> None:
        """Bias, bad and allowed tokens."""
        sampling = drawn.request.sampling
        if self._one_in(6):
            good = {
                token_id: self._random.choice((-100.0, -1.0, 0.0, 3.0, 100.0)) for token_id in self._token_ids(8)
            }
            if self._one_in(10):
                good = dict.fromkeys(range(self._vocab_size), -100.0)
            bad = (*({self._token_id(): value} for value in (NAN, INF, -100.1, 1e30)), {self._bad_ids()[-1]: 1.0})
            sampling.logit_bias.update(self._pick(drawn, "sampling.logit_bias", [good], bad, 15))
        if self._one_in(8):
            bad_lists = (self._bad_ids(), [0] * 65)
            sampling.bad_token_ids.extend(
                self._pick(drawn, "sampling.bad_token_ids", [self._token_ids(64)], bad_lists, 15)
            )
        if self._one_in(8):
            allowed = [self._token_ids(6), [self._token_id()] * 3, list(range(self._vocab_size)) * 2]
            sampling.allowed_token_ids.extend(
                self._pick(drawn, "sampling.allowed_token_ids", allowed, [self._bad_ids()], 15)
            )
            if set(sampling.allowed_token_ids) <= set(sampling.bad_token_ids):
                drawn.bad_fields.add("sampling.allowed_token_ids")

    def _draw_stopping(self, drawn: Drawn) -> None:
        stopping = drawn.request.stopping
        if not self._one_in(200):
            good = range(1, MAX_TOKENS + 1)
            stopping.max_tokens = self._pick(drawn, "stopping.max_tokens", good, (0, MAX_CONTEXT, MOST_UINT32))
        if self._one_in(5):
            good = range(stopping.max_tokens + 1) if stopping.HasField("max_tokens") else range(MAX_TOKENS)
            bad = (MAX_CONTEXT, MOST_UINT32) if stopping.max_tokens < MAX_CONTEXT else ()
            stopping.min_tokens = self._pick(drawn, "stopping.min_tokens", good, bad)
        if self._one_in(3):
            good_stops = [self._text()[: self._random.randint(1, 3)] for _ in range(self._random.randint(1, 4))]
            bad_stops = ([""], ["x", ""], ["x"] * 100, ["x" * 10_000], ["é" * 257])
            stopping.stop.extend(
                self._pick(drawn, "stopping.stop", (good_stops, ["x" * 256, *"abcdefghijklmno"]), bad_stops)
            )
        if self._one_in(5):
            bad_ids = (self._bad_ids(), range(65) if self._vocab_size > 64 else [64])
            stopping.stop_token_ids.extend(
                self._pick(drawn, "stopping.stop_token_ids", [self._token_ids(64)], bad_ids, 15)
            )
        stopping.ignore_eos = self._one_in(3)
        stopping.include_stop_in_output = self._one_in(2)
        if stopping.min_tokens and self._leaves_no_token(drawn.request):
            drawn.bad_fields.add("stopping.min_tokens")

    def _leaves_no_token(self, request: pb.GenerateRequest) -> bool:
        """Whether everything that may be sampled would end the answer."""
        ending = set(request.stopping.stop_token_ids)
        if not request.stopping.ignore_eos:
            ending |= set(self._vocabulary.eos_token_ids)
        allowed = set(request.sampling.allowed_token_ids) or set(range(self._vocab_size))
        return allowed <= ending | set(request.sampling.bad_token_ids)

    def _draw_speculation(self, drawn: Drawn) -> None:
        speculation = drawn.request.speculation
        if self._one_in(8):
            speculation.enabled = self._one_in(2)
        if self._one_in(2):
            speculation.num_draft_tokens = self._pick(
                drawn, "speculation.num_draft_tokens", range(17), (17, 64, MOST_UINT32), 20
            )
        if self._one_in(3):
            policies = common_pb2.VerificationPolicy.values()
            speculation.verification_policy = self._pick(
                drawn, "speculation.verification_policy", policies, (5, 77)
            )

    def _draw_answers(self, drawn: Drawn) -> None:
        """How many, under which sample indices, with which log-probabilities."""
        request = drawn.request
        if self._one_in(12):
            request.n = self._pick(drawn, "n", (1, 2, 3), (0, 17, MOST_UINT32), 8)
        if self._one_in(12):
            good = (0, 1, 2**31, 2**32 - 3)
            request.sample_index = self._pick(drawn, "sample_index", good, (MOST_UINT32,) if request.n > 1 else ())
        if self._one_in(8):
            request.logprobs.num_top = self._pick(drawn, "logprobs.num_top", range(21), (21, MOST_UINT32), 15)
            modes = common_pb2.LogprobsMode.values()
            request.logprobs.mode = self._pick(drawn, "logprobs.mode", modes, (3, 77), 15)
