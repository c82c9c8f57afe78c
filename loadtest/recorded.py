"""Requests and what each gives without speculation and without company: what every load test compares with."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from tandem.client import GenerateOptions, SyncTandemClient
from tandem.types import GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request and its solo run."""

    prompt: str
    options: GenerateOptions
    text: str
    token_ids: tuple[int, ...]

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is sampled."""
        temperature = self.options.get("temperature")
        return temperature is not None and temperature <= GREEDY_TEMPERATURE

    def __str__(self) -> str:
        return f"{self.prompt[:40]!r} ({len(self.prompt)} characters) with {self.options}"


def to_json(recorded: Sequence[Recorded]) -> str:
    """For another process."""
    return json.dumps([asdict(one) for one in recorded])


def from_json(text: str) -> list[Recorded]:
    """As `to_json` was given them: JSON has strings where biases have token ids."""
    recorded = []
    for one in json.loads(text):
        options = one["options"]
        if "logit_bias" in options:
            options["logit_bias"] = {int(token_id): bias for token_id, bias in options["logit_bias"].items()}
        recorded.append(Recorded(one["prompt"], options, one["text"], tuple(one["token_ids"])))
    return recorded


def record(client: SyncTandemClient, requests: Iterable[tuple[str, GenerateOptions]]) -> list[Recorded]:
    """Run the requests one at a time without speculation."""
    recorded = []
    for prompt, options in requests:
        result = client.complete(prompt, **GenerateOptions(**{**options, "speculation": False}))
        recorded.append(Recorded(prompt, options, result.text, result.token_ids))
    return recorded
