"""Requests and what each gives without speculation and without company: what every load test compares with."""

from collections.abc import Iterable
from dataclasses import dataclass

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


def record(client: SyncTandemClient, requests: Iterable[tuple[str, GenerateOptions]]) -> list[Recorded]:
    """Run the requests one at a time without speculation."""
    recorded = []
    for prompt, options in requests:
        result = client.complete(prompt, **GenerateOptions(**{**options, "speculation": False}))
        recorded.append(Recorded(prompt, options, result.text, result.token_ids))
    return recorded
