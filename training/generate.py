"""`python -m training.generate`: text that the target itself writes, for its draft models to learn from.

Every line of the file depends on the recipe and its index alone: the services give one text for one seed. So a run
that was broken off goes on where it was, and the whole file can be made again.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tandem.client import TandemClient
from tandem.cluster_options import ClusterChoice
from tandem.models import resolve_model
from tandem.processes import LocalCluster
from tandem.serving.options import make_parser
from tandem.vocabulary import Vocabulary
from training.prompts import OPENERS, code_prompts

_QUESTION_TOKENS = 200
_MIN_QUESTION_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is asked, and how answers are sampled."""

    seed: int
    num_chats: int
    num_code: int
    answer_tokens: int = 256
    code_tokens: int = 96
    greedy_share: float = 0.6  # of the first answers; the others have temperature 1
    answers: int = 1  # to a question; the second and further ones have temperature 1


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and what the target went on with."""

    index: int  # of the question or the piece of code
    kind: str  # "chat" or "code"
    temperature: float
    prompt_token_ids: list[int]
    token_ids: list[int]


class Writer:
    """Asks the target for what one index stands for."""

    def __init__(self, client: TandemClient, vocabulary: Vocabulary, recipe: Recipe) -> None:
        assert vocabulary.chat_template is not None
        self._client = client
        self._vocabulary = vocabulary
        self._recipe = recipe
        code = code_prompts(random.Random(recipe.seed))
        self._code = [next(code) for _ in range(recipe.num_code)]

    async def examples(self, index: int) -> list[Example]:
        """All that the target writes for this index; nothing where it had no question."""
        rng = random.Random(f"{self._recipe.seed}/{index}")
        temperature = 0.0 if rng.random() < self._recipe.greedy_share else 1.0
        seed = rng.getrandbits(64)
        if index < self._recipe.num_code:
            prompt, kind, max_tokens = self._code[index], "code", self._recipe.code_tokens
        else:
            question = await self._question(rng.choice(OPENERS), seed)
            if question is None:
                return []
            prompt, kind, max_tokens = self._rendered(question), "chat", self._recipe.answer_tokens
        prompt_ids, examples = self._vocabulary.encode_verbatim(prompt), []
        for number in range(self._recipe.answers):
            options: dict[str, Any] = {"temperature": temperature if number == 0 else 1.0, "seed": seed}
            result = await self._client.complete(
                prompt, sample_index=number, max_tokens=max_tokens, speculation=False, **options
            )
            examples.append(Example(index, kind, options["temperature"], prompt_ids, list(result.token_ids)))
        return examples

    async def _question(self, opener: str, seed: int) -> str | None:
        """A user's message that the model itself makes of the opener."""
        template = self._vocabulary.chat_template
        assert template is not None
        rendered = template.render([{"role": "user", "content": opener}], add_generation_prompt=False)
        prompt = rendered[: rendered.rindex(opener) + len(opener)]
        result = await self._client.complete(
            prompt, temperature=1.0, top_p=0.95, seed=seed, max_tokens=_QUESTION_TOKENS, speculation=False
        )
        return opener + result.text if len(result.token_ids) >= _MIN_QUESTION_TOKENS else None

    def _rendered(self, question: str) -> str:
        assert self._vocabulary.chat_template is not None
        return self._vocabulary.chat_template.render([{"role": "user", "content": question}])


def missing(recipe: Recipe, out: Path) -> list[int]:
    """Indices of the examples that the file lacks, in an order of their own: a part of the run is of every kind."""
    done = {json.loads(line)["index"] for line in out.read_text().splitlines()} if out.exists() else set()
    indices = [index for index in range(recipe.num_code + recipe.num_chats) if index not in done]
    random.Random(recipe.seed).shuffle(indices)
    return indices


async def write(
    address: str, vocabulary: Vocabulary, recipe: Recipe, indices: Sequence[int], lines: TextIO, at_once: int
) -> None:
    """These examples, `at_once` of them at a time, each appended as soon as it is there."""
    remaining = iter(indices)
    columns = (TextColumn("{task.fields[tokens]:,} tokens"), MofNCompleteColumn(), TimeRemainingColumn())
    async with TandemClient(address) as client:
        writer = Writer(client, vocabulary, recipe)
        with Progress(*columns) as progress:
            bar = progress.add_task("examples", total=len(indices), tokens=0)
            num_tokens = 0

            async def work() -> None:
                nonlocal num_tokens
                for index in remaining:
                    examples = await writer.examples(index)
                    lines.write("".join(json.dumps(asdict(example)) + "\n" for example in examples))
                    lines.flush()
                    num_tokens += sum(len(example.token_ids) for example in examples)
                    progress.update(bar, advance=1, tokens=num_tokens)

            await asyncio.gather(*(work() for _ in range(at_once)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Start a target, have it write, stop it."""
    parser = make_parser("python -m training.generate", __doc__)
    parser.add_argument("--model", default="smollm2-135m", help="the target: a name, a directory or a .gguf file")
    parser.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; what it already holds is kept")
    parser.add_argument("--seed", type=int, default=1, help="of the recipe")
    parser.add_argument("--chats", type=int, default=6000, help="conversations")
    parser.add_argument("--code", type=int, default=2000, help="pieces of code to continue")
    parser.add_argument("--greedy-share", type=float, default=0.6, help="of the first answers")
    parser.add_argument("--answers", type=int, default=1, help="to each question, one after the other")
    parser.add_argument("--at-once", type=int, default=48, help="requests in flight")
    parser.add_argument("--threads", type=int, help="of the target; default: all cores")
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    vocabulary = Vocabulary.load(resolve_model(options.model))
    choice = ClusterChoice(options.model, options.dtype, None, False, 0, options.threads)
    recipe = Recipe(
        options.seed, options.chats, options.code, greedy_share=options.greedy_share, answers=options.answers
    )
    indices = missing(recipe, options.out)
    with LocalCluster(choice.plan(), quiet=True) as cluster, options.out.open("a") as lines:
        address = cluster.addresses["orchestrator"]
        asyncio.run(write(address, vocabulary, recipe, indices, lines, options.at_once))


if __name__ == "__main__":
    main()
