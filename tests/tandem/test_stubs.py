"""The committed stubs are those that protos/ generates, and the contract lints."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

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


def required(package: str) -> Version:
    """The oldest version of a package that an installation may have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = [
        one for one in map(Requirement, project["dependencies"]) if canonicalize_name(one.name) == package
    ]
    (oldest,) = [one.version for one in requirement.specifier if one.operator == ">="]
    return Version(oldest)


def test_every_allowed_protobuf_and_grpc_is_one_that_the_stubs_can_be_imported_with() -> None:
    """grpc #39912: stubs newer than the library they are imported with raise at import."""
    asked = {"protobuf": r"Protobuf Python Version: (\S+)", "grpcio": r"GRPC_GENERATED_VERSION = '(\S+)'"}
    stubs = sorted((ROOT / "tandem").glob("*/v1/*_pb2*.py"))
    for package, pattern in asked.items():
        found = [version for path in stubs for version in re.findall(pattern, path.read_text())]
        assert len(found) == 4, package  # of every package of the contract
        assert max(map(Version, found)) <= required(package), package
