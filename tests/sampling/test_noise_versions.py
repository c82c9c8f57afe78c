"""Torch's and Triton's noise against tandem/rng.py; which of them a row meets."""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.kernels.noise import CRITICAL_BITS
from engine.sampling import noise_torch, sampler
from engine.sampling.gumbel import NoiseKey, gumbel_argmax
from engine.sampling.rows import Row
from engine.sampling.sampler import RowsArgmax, device_argmax, sample_row
from tandem import rng
from tandem.rng import F32, F64, U32
from tests.sampling.helpers import make_spec
from tests.sampling.interpreted import DEVICE, noise_triton, tl, triton
from tests.sampling.noise_vectors import ALL_NOISE_SHA256, GUMBEL_BITS, GUMBEL_NOISE, KNOWN_ANSWERS, ONES

KEYS = [NoiseKey(0, 0, 0, 0), NoiseKey(2**64 - 1, (5 << 8) | 1, 2**31, 3), NoiseKey(2**63, 2, 70_000, 2**20)]
ALL_BITS = np.arange(2**23, dtype=np.uint32) << np.uint32(9)
ARGMAX = pytest.mark.parametrize("argmax", [noise_torch.gumbel_argmax_rows, noise_triton.gumbel_argmax_rows])


@triton.jit
def _bits_kernel(keys, out, first_token, NUM_TOKENS: tl.constexpr):  # noqa: N803
    seed, word, position, sample_index = tl.load(keys), tl.load(keys + 1), tl.load(keys + 2), tl.load(keys + 3)
    bits = noise_triton.token_bits(seed, word, position, sample_index, first_token, NUM_TOKENS)
    tl.store(out + tl.arange(0, NUM_TOKENS), bits.to(tl.int64))


@triton.jit
def _noise_kernel(bits, uniforms, noise, NUM_TOKENS: tl.constexpr):  # noqa: N803
    place = tl.program_id(0) * NUM_TOKENS + tl.arange(0, NUM_TOKENS)
    block = tl.load(bits + place).to(tl.uint32)
    tl.store(uniforms + place, noise_triton.uniform_from_bits(block))
    tl.store(noise + place, noise_triton.gumbel_from_bits(block))


def triton_bits(key: NoiseKey, num_tokens: int, first_token: int = 0) -> U32:
    out = torch.empty(num_tokens, dtype=torch.int64, device=DEVICE)
    table = noise_triton.key_table([key], DEVICE)
    _bits_kernel[(1,)](table, out, first_token, num_tokens, enable_fp_fusion=False)
    return out.cpu().numpy().astype(np.uint32)


def triton_noise(bits: U32, num_tokens: int) -> tuple[F64, F32]:
    """Uniforms and noise of bit patterns, `num_tokens` a program."""
    table = torch.from_numpy(bits.astype(np.int64)).to(DEVICE)
    uniforms = torch.empty(bits.size, dtype=torch.float64, device=DEVICE)
    noise = torch.empty(bits.size, dtype=torch.float32, device=DEVICE)
    _noise_kernel[(bits.size // num_tokens,)](table, uniforms, noise, num_tokens, enable_fp_fusion=False)
    return uniforms.cpu().numpy(), noise.cpu().numpy()


def torch_noise(bits: U32) -> tuple[F64, F32]:
    table = torch.from_numpy(bits.astype(np.int64))
    return noise_torch.uniform_from_bits(table).numpy(), noise_torch.gumbel_from_bits(table).numpy()


@pytest.mark.parametrize(("counter", "seed", "expected"), KNOWN_ANSWERS)
def test_both_give_the_published_answers(
    counter: tuple[int, int, int, int], seed: int, expected: tuple[int, int, int, int]
) -> None:
    words = tuple(torch.tensor([word]) for word in counter)
    low, high = torch.tensor([seed & ONES]), torch.tensor([seed >> 32])
    assert tuple(noise_torch.philox4x32(words, low, high)[0].tolist()) == expected
    block, position, sample_index, word = counter
    bits = triton_bits(NoiseKey(seed, word, position, sample_index), 4, first_token=4 * block)
    assert tuple(bits.tolist()) == expected


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 1001, 4096])
def test_the_bits_of_a_vocabulary_are_the_references(vocab_size: int) -> None:
    bits = noise_torch.vocabulary_bits(KEYS, vocab_size, torch.device("cpu"))
    for row, key in zip(bits, KEYS, strict=True):
        expected = rng.vocabulary_bits(key.seed, key.word, key.position, vocab_size, key.sample_index)
        assert np.array_equal(row.numpy(), expected)
        assert np.array_equal(triton_bits(key, 4096)[:vocab_size], expected)


def test_uniforms_are_the_references_and_never_0_or_1() -> None:
    bits = np.array([0, 511, 512, ONES - 511, ONES, *GUMBEL_BITS, *range(9)], dtype=np.uint32)
    assert bits.size == 32
    expected = rng.uniform_from_bits(bits)
    for uniforms in (torch_noise(bits)[0], triton_noise(bits, 32)[0]):
        assert np.array_equal(uniforms, expected)
        assert uniforms.min() == 2.0**-24
        assert uniforms.max() == 1 - 2.0**-24


def test_committed_vectors() -> None:
    bits = np.array([*GUMBEL_BITS, *[0] * 14], dtype=np.uint32)
    for noise in (torch_noise(bits)[1], triton_noise(bits, 32)[1]):
        assert noise[: len(GUMBEL_BITS)].tolist() == GUMBEL_NOISE


def test_noise_is_the_references_for_every_uniform() -> None:
    noise = torch_noise(ALL_BITS)[1]
    assert sha256(noise.astype("<f4").tobytes()).hexdigest() == ALL_NOISE_SHA256
    some = slice(CRITICAL_BITS >> 9 & 7, None, 8)
    assert np.array_equal(triton_noise(ALL_BITS[some], 2**20)[1], noise[some])


@ARGMAX
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocab_size", [1, 5, 1024, 2500])
@pytest.mark.parametrize("shape", ["spread", "tied", "masked", "nothing left"])
def test_the_winner_of_every_row_is_the_references(
    argmax: RowsArgmax, dtype: type, vocab_size: int, shape: str
) -> None:
    generator = np.random.default_rng(vocab_size)
    for attempt in range(3):
        values = (generator.standard_normal((len(KEYS), vocab_size)) * 3).astype(dtype)
        if shape == "tied":
            values = values.round() + 2.0**22  # scores on a coarse grid
            values = values.astype(dtype)
        elif shape != "spread":
            values[:, generator.random(vocab_size) < (0.95 if shape == "masked" else 1.0)] = -np.inf
        keys = [NoiseKey(key.seed, key.word, key.position + attempt, key.sample_index) for key in KEYS]
        winners = argmax(torch.from_numpy(values).to(DEVICE), keys).tolist()
        assert winners == [gumbel_argmax(row, key) for row, key in zip(values, keys, strict=True)]


@ARGMAX
def test_no_rows_have_no_winners(argmax: RowsArgmax) -> None:
    assert argmax(torch.empty(0, 50, device=DEVICE), []).shape == (0,)


def test_a_gpu_gets_triton_where_there_is_triton_and_torch_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    device_argmax.cache_clear()
    assert device_argmax("cuda") is noise_triton.gumbel_argmax_rows
    assert device_argmax("xpu") is noise_torch.gumbel_argmax_rows
    device_argmax.cache_clear()
    monkeypatch.setattr(sampler, "find_spec", lambda name: None)
    assert device_argmax("cuda") is noise_torch.gumbel_argmax_rows
    device_argmax.cache_clear()


class OnGpu(torch.Tensor):
    """A row that says it is on a GPU, and must not leave it."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        raise AssertionError("the row travelled")

    numpy = cpu  # type: ignore[assignment]


def test_a_row_on_a_gpu_is_sampled_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sampler, "device_argmax", lambda device_type: lambda rows, keys: rows.argmax(dim=-1) + keys[0].position
    )
    row = Row(make_spec(), (1, 2, 3, 4), (5,))
    assert sample_row(torch.tensor([0.0, 0.0, 9.0]).as_subclass(OnGpu), row) == 2 + 5


def test_a_cpu_start_loads_no_triton() -> None:
    code = """
import sys, torch, draft_service.__main__, target_service.__main__
from engine.sampling.rows import Row
from engine.sampling.sampler import sample_row
from tests.sampling.helpers import make_spec
sample_row(torch.zeros(100), Row(make_spec(), (1, 2, 3)))
sys.exit("triton" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_kernels_compile_for_nvidia_gpus(tmp_path: Path) -> None:
    code = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.sampling.noise_triton import BLOCK, _gumbel_argmax_kernel
from engine.sampling.rejection_triton import _rejection_kernel
for kernel, pointers in (
    (_gumbel_argmax_kernel, {"values": "*fp32", "keys": "*i64", "tokens": "*i64"}),
    (_gumbel_argmax_kernel, {"values": "*fp64", "keys": "*i64", "tokens": "*i64"}),
    (
        _rejection_kernel,
        {"acceptance_ratios": "*fp64", "log_residuals": "*fp64", "processed": "*fp32"}
        | {"requests": "*i64", "decisions": "*i64"},
    ),
):
    source = ASTSource(kernel, pointers | {"vocab_size": "i32", "NUM_TOKENS": "constexpr"}, {"NUM_TOKENS": BLOCK})
    assert compile(source, GPUTarget("cuda", 90, 32), {"enable_fp_fusion": False}).asm["cubin"]
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
