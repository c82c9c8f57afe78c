"""The compiled Gumbel-max sweep: ctypes over engine/kernels/noise.cpp (calls release the interpreter lock).

Its bits are tandem/rng.py's, and its two logarithms are float64, rounded to float32. Of the 2^23 uniforms there
are, all but one leave so much room to the next float32 that any logarithm within one unit in the last place gives
the same noise; a test goes through them all. Letters: V vocabulary, N bit patterns.
"""

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.kernels.build import KernelBuildError, build_library
from tandem import rng
from tandem.rng import F32, F64, U32

_log = logging.getLogger(__name__)

# The uniform next to 1/e: its noise, 2.5e-8, hangs on the last bit of the inner logarithm.
CRITICAL_BITS = 3085996 << 9
_CHECKED = np.array([CRITICAL_BITS, *range(0, 2**32, 2**20), 2**32 - 1], dtype=np.uint32)
_MULTIPLE = 16  # of the bit patterns in a call

_POINTER, _INT64, _UINT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
_KEY = (ctypes.c_uint64, _UINT32, _UINT32, _UINT32)


class CompiledNoise:
    """A compiled library; KernelBuildError without a working compiler or where its noise is not numpy's."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        path = build_library(Path(__file__).with_name("noise.cpp"), cache_dir)
        self.name = path.stem
        self._library = ctypes.CDLL(str(path))
        argmax = (_POINTER, _INT64, *_KEY)
        self._argmax = {
            np.dtype(name).char: self._function(f"gumbel_argmax_{name}", _INT64, *argmax)
            for name in ("float32", "float64")
        }
        self._bits = self._function("noise_bits", None, _UINT32, *_KEY, _POINTER)
        self._noise_and_bounds = self._function("noise_and_bounds", None, _POINTER, _INT64, _POINTER, _POINTER)
        different = self.noise_and_bounds(_CHECKED)[0] != rng.gumbel_from_bits(_CHECKED)
        if different.any():
            raise KernelBuildError(f"{self.name} differs from numpy in the noise of {different.sum()} bit patterns")

    def _function(self, name: str, result: object, *arguments: object) -> Callable[..., int]:
        function: Callable[..., int] = self._library[f"tandem_{name}"]
        function.argtypes, function.restype = arguments, result  # type: ignore[attr-defined]
        return function

    def argmax(self, values: F32 | F64, seed: int, word: int, position: int, sample_index: int) -> int:
        """argmax(values + gumbel(seed, word, position, V, sample_index)) over [V], as numpy gives it.

        The sum is in the values' own type; ties go to the lowest id. There must be no NaN among the values.
        """
        row = np.ascontiguousarray(values)
        return self._argmax[row.dtype.char](row.ctypes.data, row.size, seed, word, position, sample_index)

    def bits(self, first_block: int, seed: int, word: int, position: int, sample_index: int) -> U32:
        """The sweep's bits of the sixteen tokens from block `first_block` on."""
        out = np.empty(16, dtype=np.uint32)
        self._bits(first_block, seed, word, position, sample_index, out.ctypes.data)
        return out

    def noise_and_bounds(self, bits: U32) -> tuple[F32, F32]:
        """`rng.gumbel_from_bits`, and the bounds that the sweep passes tokens over by -> float32 [N] each."""
        padded = np.resize(bits, -(-bits.size // _MULTIPLE) * _MULTIPLE)
        noise, bounds = np.empty((2, padded.size), dtype=np.float32)
        self._noise_and_bounds(padded.ctypes.data, padded.size, noise.ctypes.data, bounds.ctypes.data)
        return noise[: bits.size], bounds[: bits.size]


def build_noise(cache_dir: Path | None = None) -> CompiledNoise | None:
    """The compiled sweep, or None, with the reason logged, where it cannot be had."""
    try:
        return CompiledNoise(cache_dir)
    except KernelBuildError as error:
        _log.warning("falling back to numpy for noise, which is slower: %s", error)
        return None


@functools.cache
def compiled_noise() -> CompiledNoise | None:
    """`build_noise` once a process. The first call may compile for a second: engines make it when they load."""
    return build_noise()
