"""Has a target meet every number of rows that a step can have.

For each that it meets oneDNN keeps generated code (engine/batch.py), some 200 MiB in all for the demo model: a cache
that fills for hours under a small load, and would look like a leak.
"""

import asyncio

from engine.batch import MAX_EXACT_ROWS, num_linear_rows
from engine.models.llama import MAX_HEAD_ROWS
from tandem.client import GenerateOptions, TandemClient
from tandem.defaults import MAX_STEP_TOKENS

_PROMPT_TOKENS = 4
_SHORTEST = 24  # tokens: the last answers begin some steps after the first
_FIRST_ID = 100  # past the special tokens
_PASSES = 2  # a step in which two answers end leaves numbers out


def meet_row_counts(address: str) -> None:
    """On idle services with a model; more than a minute for the demo model on one thread."""
    for _ in range(_PASSES):
        asyncio.run(_meet(address))


async def _meet(address: str) -> None:
    async with TandemClient(address) as client:
        # One answer ends after the other: every number of rows down to one, in the layers and in the head.
        num_answers = max(MAX_EXACT_ROWS, MAX_HEAD_ROWS)
        await asyncio.gather(
            *(
                client.complete(prompt(_PROMPT_TOKENS, index), **options(_SHORTEST + 2 * index))
                for index in range(num_answers)
            )
        )
        counts = sorted({num_linear_rows(number) for number in range(num_answers, MAX_STEP_TOKENS + 1)})
        for count in counts:  # prompts that are alone take one step
            await client.complete(prompt(count, count), **options(1))


def prompt(num_tokens: int, number: int) -> list[int]:
    """One that shares no beginning with another number's, so that no cache has its rows."""
    return [_FIRST_ID + number, *range(_FIRST_ID, _FIRST_ID + num_tokens - 1)]


def options(num_tokens: int) -> GenerateOptions:
    """So many tokens, one a step."""
    return {"temperature": 0.0, "max_tokens": num_tokens, "min_tokens": num_tokens, "speculation": False}
