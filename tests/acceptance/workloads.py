"""What acceptance is measured on: requests that no training text has, and what the demo model answered.

`python -m tests.acceptance.workloads` records the answers anew, without speculation.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.churn.requests import spec_bench_prompts
from tandem.client import TandemClient
from tandem.cluster_options import ClusterChoice
from tandem.models import resolve_model
from tandem.processes import LocalCluster
from tandem.types import DraftProbsTransport, SamplingParams, SessionSpec, VerificationPolicy
from tandem.vocabulary import Vocabulary
from tests.acceptance.replay import Answer
from training.prompts import EVALUATION_MODULES, stdlib

MODEL = "smollm2-135m"
RECORDED = Path(__file__).with_name("recorded.json")
WORKLOADS = ("chat", "code")
TEMPERATURES = (0.0, 0.8)
MAX_TOKENS = 128
_FIRST_LINE, _NUM_LINES = 60, 24  # of a file that is gone on with
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Recorded:
    """One answer as the file has it."""

    workload: str
    temperature: float
    seed: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]

    @property
    def answer(self) -> Answer:
        """For `replay`."""
        is_greedy = self.temperature == 0.0
        spec = SessionSpec(
            token_ids=self.prompt_ids,
            prompt_len=len(self.prompt_ids),
            sampling=SamplingParams(temperature=self.temperature, seed=self.seed),
            max_tokens=len(self.token_ids),
            verification_policy=VerificationPolicy.GREEDY if is_greedy else VerificationPolicy.COUPLED,
            draft_probs_transport=DraftProbsTransport.ONE_HOT if is_greedy else DraftProbsTransport.COUPLED,
        )
        return Answer(spec, self.token_ids)


def recorded(workload: str, temperature: float) -> list[Answer]:
    """The answers of one workload at one temperature."""
    entries = [Recorded(**entry) for entry in json.loads(RECORDED.read_text())["answers"]]
    return [entry.answer for entry in entries if (entry.workload, entry.temperature) == (workload, temperature)]


def prompts(vocabulary: Vocabulary) -> dict[str, list[list[int]]]:
    """Token ids by workload: Spec-Bench in the chat template; 24 lines of each of twenty standard library files."""
    chats = [list(vocabulary.encode_chat([{"role": "user", "content": text}])) for text in spec_bench_prompts()]
    codes = []
    for module in EVALUATION_MODULES:
        lines = (stdlib() / f"{module}.py").read_text("utf-8").splitlines(keepends=True)
        codes.append(list(vocabulary.encode("".join(lines[_FIRST_LINE : _FIRST_LINE + _NUM_LINES]))))
    return {"chat": chats, "code": codes}


async def _record(address: str, cases: Sequence[tuple[str, float, int, list[int]]]) -> list[dict[str, Any]]:
    """Every case, some at a time."""
    gate = asyncio.Semaphore(_AT_ONCE)
    async with TandemClient(address) as client:

        async def one(workload: str, temperature: float, seed: int, prompt_ids: list[int]) -> dict[str, Any]:
            async with gate:
                result = await client.complete(
                    prompt_ids, temperature=temperature, seed=seed, max_tokens=MAX_TOKENS, speculation=False
                )
            return {
                "workload": workload,
                "temperature": temperature,
                "seed": seed,
                "prompt_ids": prompt_ids,
                "token_ids": list(result.token_ids),
            }

        return list(await asyncio.gather(*(one(*case) for case in cases)))


def main() -> None:
    """Record and write."""
    made = prompts(Vocabulary.load(resolve_model(MODEL)))
    cases = [
        (workload, temperature, 1000 + number, prompt_ids)
        for workload in WORKLOADS
        for temperature in TEMPERATURES
        for number, prompt_ids in enumerate(made[workload])
    ]
    plan = ClusterChoice(MODEL, "float32", None, False, 0, None).plan()
    with LocalCluster(plan, quiet=True) as cluster:
        answers = asyncio.run(_record(cluster.addresses["orchestrator"], cases))
    lines = ",\n".join(json.dumps(answer) for answer in answers)
    what = f"{MODEL} in float32, at most {MAX_TOKENS} tokens an answer"
    RECORDED.write_text(f'{{"what": {json.dumps(what)}, "answers": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
