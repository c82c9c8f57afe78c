"""Regenerate the committed gRPC stubs from protos/ (`make protos`); `--out DIR` is for the diff test."""

import argparse
import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"


def generate(out: Path) -> None:
    """Write the .py and .pyi stubs of every proto under `out`, in their packages; exits on a protoc error."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    files = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    arguments = [f"--proto_path={PROTOS}", f"--proto_path={well_known}"]
    arguments += [f"--{kind}={out}" for kind in ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")]
    code = protoc.main(["protoc", *arguments, *files])
    if code != 0:
        sys.exit(code)
    for package in sorted({(out / file).parent for file in files}):
        (package / "__init__.py").write_text('"""Generated from protos/; do not edit."""\n')


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT)
    generate(parser.parse_args().out)
