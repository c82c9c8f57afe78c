"""What the README points at exists, and its Python runs against real (toy) services."""

import re
import subprocess
import sys
from pathlib import Path

from draft_service.__main__ import build_parser as draft_parser
from loadtest.up import tandem_up
from orchestrator.__main__ import build_parser as orchestrator_parser
from tandem.defaults import ORCHESTRATOR_ADDRESS
from target_service.__main__ import build_parser as target_parser

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PARSERS = {"target": target_parser, "draft": draft_parser, "orchestrator": orchestrator_parser}


def test_every_link_and_every_named_file_is_there() -> None:
    paths = re.findall(r"\]\(([^)]+)\)", README)
    paths += re.findall(r"`([\w./]+\.(?:py|yml|md)|[\w./]+/)`", README)
    assert len(paths) > 15
    assert [path for path in paths if not _is_there(path)] == []


def _is_there(path: str) -> bool:
    name, _, anchor = path.partition("#")
    if not (ROOT / name).exists():
        return False
    headings = re.findall(r"^#+ (.+)$", (ROOT / name).read_text(), re.MULTILINE) if anchor else []
    return not anchor or anchor in {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings
    }


def test_every_make_target_it_names_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make (\w+)", README)) <= targets
    assert {"demo", "test"} <= targets


def test_the_services_it_starts_by_hand_are_what_this_build_understands_and_find_each_other() -> None:
    commands = re.findall(r"^tandem serve (\w+) ([^#\n]*)", README, re.MULTILINE)
    options = {service: PARSERS[service]().parse_args(words.split()) for service, words in commands}
    assert options.keys() == PARSERS.keys()
    assert options["orchestrator"].target == options["target"].address
    assert options["orchestrator"].draft == options["draft"].address
    assert options["orchestrator"].model == options["target"].model
    assert options["orchestrator"].address == ORCHESTRATOR_ADDRESS


def test_its_python_runs() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    with tandem_up(["--toy", "hashed:vocab=512,seed=3"]) as addresses:
        # Toy vocabularies have no chat template.
        code = snippet.replace("127.0.0.1:50050", addresses["orchestrator"])
        code = code.replace('[{"role": "user", "content": "Name three colours."}]', '"Name three colours."')
        answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert "accepted: " in answer.stdout
    assert re.search(r" (stop|length)$", answer.stdout.strip())
