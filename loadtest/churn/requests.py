"""The distinct requests of a run: prompts from a few words to many hundred tokens, greedy and sampled in turn."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from tandem.client import GenerateOptions

MAX_TOKENS = 64
MAX_LONG_TOKENS = 256  # of every third answer: longer than what a session is admitted with, so that memory runs out
MAX_DRAFT_TOKENS = 8
MAX_PROMPT_CHARS = 2400  # some 600 tokens of the demo model
_SPEC_BENCH = Path(__file__).parents[2] / "tests" / "fixtures" / "greedy_smollm2_135m.json"
_CODE = "def subtract_{0}(a, b):\n    return a - b - {0}\n\n\n"  # its repetitions are easy to draft for

_GREEDY: Sequence[GenerateOptions] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logit_bias": {11: -5.0}},
)
_SAMPLED: Sequence[GenerateOptions] = (
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 0.7, "min_p": 0.05, "frequency_penalty": 0.4},
    {"temperature": 1.2, "top_p": 0.95, "presence_penalty": 0.5},
    {"temperature": 0.3},
)
_STOPS = (["."], ["\n"], [" the", "\n\n"], [" of ", "<4"])  # the last is for toy vocabularies


def spec_bench_prompts() -> list[str]:
    """The prompts of Spec-Bench (Apache-2.0) that the repository holds."""
    return [case["prompt"] for case in json.loads(_SPEC_BENCH.read_text())["prompts"]]


def make_requests(
    prompts: Sequence[str], num_requests: int, seed: int, max_long_tokens: int = MAX_LONG_TOKENS
) -> list[tuple[str, GenerateOptions]]:
    """The same requests for the same arguments; even ones are greedy, odd ones sampled with a seed of their own."""
    rng = random.Random(seed)
    return [
        (_prompt(rng, prompts), _options(rng, index % 2 == 0, max_long_tokens)) for index in range(num_requests)
    ]


def _prompt(rng: random.Random, prompts: Sequence[str]) -> str:
    match rng.choice(("words", "words", "whole", "several", "repeated")):
        case "words":
            text = " ".join(rng.choice(prompts).split()[: rng.randint(1, 5)])
        case "whole":
            text = rng.choice(prompts)
        case "several":
            text = "\n\n".join(rng.sample(prompts, rng.randint(2, 8)))
        case _:
            text = "".join(_CODE.format(number) for number in range(rng.randint(2, 20)))
    return text[:MAX_PROMPT_CHARS]


def _options(rng: random.Random, is_greedy: bool, max_long_tokens: int) -> GenerateOptions:
    options = GenerateOptions(**rng.choice(_GREEDY if is_greedy else _SAMPLED))
    if not is_greedy:
        options["seed"] = rng.getrandbits(64)
    limits = (MAX_TOKENS, max_long_tokens) if rng.random() < 1 / 3 else (1, MAX_TOKENS)
    options["max_tokens"] = max_tokens = rng.randint(*limits)
    if rng.random() < 0.2:
        options["min_tokens"] = rng.randint(1, max_tokens)
    if rng.random() < 0.3:
        options["stop"] = rng.choice(_STOPS)
    if rng.random() < 0.5:
        options["num_draft_tokens"] = rng.randint(1, MAX_DRAFT_TOKENS)
    if rng.random() < 0.3:
        options["ignore_eos"] = True
    if rng.random() < 0.3:
        options["priority"] = rng.choice((-10, 10))
    return options
