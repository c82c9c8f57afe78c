"""Locust as the load tests start it, from a test that plays or watches the service."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

from loadtest.recorded import Recorded

ROOT = Path(__file__).resolve().parents[2]


def write_answers(file: Path, recorded: Iterable[Recorded]) -> Path:
    """What the users ask, and have to be given."""
    file.write_text(json.dumps([asdict(one) for one in recorded]))
    return file


@asynccontextmanager
async def locust(command: Sequence[str], log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """It runs; killed at the end should it not have ended."""
    with log.open("wb") as words:
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=words, stderr=words)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
