"""What the README points at exists, and its Python runs against real (toy) services."""

import re
import subprocess
import sys
from pathlib import Path

from loadtest.up import tandem_up

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_every_link_and_every_named_file_is_there() -> None:
    paths = re.findall(r"\]\(([^)]+)\)", README)
    paths += re.findall(r"`([\w./]+\.(?:py|yml|md)|[\w./]+/)`", README)
    assert len(paths) > 15
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_every_make_target_it_names_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make (\w+)", README)) <= targets
    assert {"demo", "test"} <= targets


def test_its_python_runs() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    with tandem_up(["--toy", "hashed:vocab=512,seed=3"]) as addresses:
        # Toy vocabularies have no chat template.
        code = snippet.replace("127.0.0.1:50050", addresses["orchestrator"])
        code = code.replace('[{"role": "user", "content": "Name three colours."}]', '"Name three colours."')
        answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert "accepted: " in answer.stdout
    assert re.search(r" (stop|length)$", answer.stdout.strip())
