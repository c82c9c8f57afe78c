"""`python -m loadtest`: `tandem up`, record answers, let locust load it, judge what happened.

Exit code 0 only when at least one request finished, none failed or gave another text than the recorded one, and
both model services are idle afterwards.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from loadtest.idle import wait_idle
from loadtest.recorded import record, to_json
from loadtest.up import tandem_up
from tandem.client import GenerateOptions, SyncTandemClient

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
PROMPTS = [
    ("def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n", GenerateOptions(temperature=0.0)),
    ("The three primary colours are", GenerateOptions(temperature=0.0)),
    ("Once upon a time there was a", GenerateOptions(temperature=0.8, top_p=0.9, seed=11)),
    ("for i in range(10):\n    print(i)\nfor j in range(10):\n", GenerateOptions(temperature=0.7, seed=12)),
    ("A recipe for bread: flour, water,", GenerateOptions(temperature=1.0, top_k=40, seed=13)),
    ("1, 2, 3, 1, 2, 3, 1, 2,", GenerateOptions(temperature=0.0, num_draft_tokens=6)),
]
MAX_TOKENS = 32


def locust_command(address: str, answers: Path, users: int, locustfile: Path = LOCUSTFILE) -> list[str]:
    """All users from the start, without end."""
    command = [sys.executable, "-m", "locust", "--headless", "--only-summary", "-f", str(locustfile)]
    command += ["--host", address, "--answers", str(answers)]
    return [*command, "--users", str(users), "--spawn-rate", str(users)]


def run_locust(address: str, answers: Path, seconds: int, users: int, folder: Path) -> int:
    """Locust's own exit code: 1 when any request failed."""
    command = locust_command(address, answers, users)
    command += ["--run-time", f"{seconds}s", "--stop-timeout", "30", "--json-file", str(folder / "stats")]
    return subprocess.run(command, check=False, timeout=seconds + 120).returncode


def num_finished(folder: Path) -> int:
    """Generations that locust counted."""
    entries = json.loads((folder / "stats.json").read_text())
    return sum(entry["num_requests"] for entry in entries if entry["name"] == "Generate")


def main() -> int:
    """Run the whole test; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--toy", help="a toy engine instead of the model, e.g. hashed:vocab=512,seed=3")
    arguments = parser.parse_args()
    what = ["--toy", arguments.toy] if arguments.toy else ["--model", arguments.model]
    with (
        tempfile.TemporaryDirectory(prefix="tandem-load-") as name,
        tandem_up(what) as addresses,
        SyncTandemClient(addresses["orchestrator"]) as client,
    ):
        folder = Path(name)
        answers = folder / "answers.json"
        requests = [(prompt, GenerateOptions(**options, max_tokens=MAX_TOKENS)) for prompt, options in PROMPTS]
        answers.write_text(to_json(record(client, requests)))
        code = run_locust(client.address, answers, arguments.seconds, arguments.users, folder)
        finished, held = num_finished(folder), wait_idle(client)
    sys.stdout.write(
        f"finished {finished}, locust's exit code {code}, in use afterwards: {'; '.join(held) or 'nothing'}\n"
    )
    return 0 if code == 0 and finished > 0 and not held else 1


if __name__ == "__main__":
    sys.exit(main())
