"""The committed stubs are those that protos/ generates, and the contract lints."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def test_committed_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/generate_stubs.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, env={"PATH": str(BIN)}, capture_output=True)
    generated = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(generated) == 4 * 5  # four packages: __init__, and .py and .pyi of messages and services
    for path in generated:
        assert (ROOT / path).read_text() == (tmp_path / path).read_text(), f"{path} is stale: run `make protos`"


def test_the_contract_lints_and_is_formatted() -> None:
    subprocess.run([str(BIN / "buf"), "lint", str(ROOT / "protos")], check=True)
    diff = subprocess.run([str(BIN / "buf"), "format", "-d", str(ROOT / "protos")], check=True, capture_output=True)
    assert diff.stdout == b""
