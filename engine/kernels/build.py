"""Compile the C++ kernels once per machine and version, into a shared library that ctypes can load.

A library is named after everything it depends on: sources, compiler, target instruction set, flags, torch. It
is built in a folder of its own and renamed into place, so services that start at once do not meet half a file.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

COMPILER = "g++"
# No -ffast-math: the order of summation is part of the contract.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-Wno-psabi")
CACHE_FOLDER = Path(".cache") / "tandem" / "kernels"  # below the home directory
COMPILE_TIMEOUT_S = 300


class KernelBuildError(Exception):
    """The kernels cannot be compiled here; the message says what is missing or what the compiler said."""


def build_library(source: Path, cache_dir: Path | None = None, compiler: str = COMPILER) -> Path:
    """The compiled form of `source` (and the headers beside it), from the cache or compiled now."""
    if shutil.which(compiler) is None:
        raise KernelBuildError(f"there is no {compiler} on the PATH")
    cache_dir = _default_cache_dir() if cache_dir is None else cache_dir
    library = cache_dir / f"{source.stem}-{_build_key(source, compiler)}.so"
    if library.exists():
        return library
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix="build-") as folder:
            built = Path(folder) / library.name
            _compile(source, built, compiler)
            os.replace(built, library)
    except OSError as error:
        raise KernelBuildError(f"{cache_dir} cannot hold compiled kernels: {error}") from error
    _log.info("compiled %s to %s", source.name, library)
    return library


def _default_cache_dir() -> Path:
    """KernelBuildError for a user without a home directory, as containers run them."""
    try:
        return Path.home() / CACHE_FOLDER
    except RuntimeError as error:
        raise KernelBuildError(f"there is no place to keep compiled kernels: {error}") from error


def _build_key(source: Path, compiler: str) -> str:
    """A hash of all that decides the result; the predefined macros tell compiler and instruction set apart."""
    digest = hashlib.sha256()
    for path in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(path.read_bytes())
    digest.update(_run([compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull]).encode())
    digest.update(f"{compiler} {FLAGS} {torch.__version__} {_torch_openmp()}".encode())
    return digest.hexdigest()[:16]


def _compile(source: Path, library: Path, compiler: str) -> None:
    """Compile, then link against the OpenMP runtime of torch, so that the process has one thread pool."""
    compiled = library.with_suffix(".o")
    _run([compiler, *FLAGS, "-c", str(source), "-o", str(compiled)])
    openmp = _torch_openmp()
    _run([compiler, "-shared", str(compiled), str(openmp) if openmp else "-fopenmp", "-o", str(library)])


def _torch_openmp() -> Path | None:
    """The libgomp that torch ships, if it ships one (else it uses the system's, and so do the kernels)."""
    package = Path(torch.__file__).parent
    found = [*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*")]
    return found[0] if found else None


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise KernelBuildError(f"{command[0]} failed: {error.stderr.strip()[-2000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"{command[0]} took more than {COMPILE_TIMEOUT_S} s") from error
    return done.stdout
