"""The compiled kernels against the torch ones, and against themselves: rows do not know their neighbours."""

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import BatchItem, ForwardBatch, build_forward_batch
from engine.kernels.base import HeadNorms, LayerKernels
from engine.kernels.build import KernelBuildError, build_library
from engine.kernels.choice import choose_kernels
from engine.kernels.cpu import HEAD_DIMS, CompiledKernels
from engine.kernels.cpu_reference import TorchKernels
from engine.kv.cache import KvCache
from engine.models.llama import build_rotary
from tests.engine.engines import DTYPES, logits_of, random_tokens, tiny_engine
from tests.engine.tiny_models import FAMILIES, tiny_config

BLOCK_SIZE = 4
TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 0.06, "rtol": 0.02}}


@pytest.fixture(params=[*DTYPES])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture(scope="module")
def compiled() -> CompiledKernels:
    return CompiledKernels()


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def normed(kernels: LayerKernels, x: torch.Tensor, delta: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    kernels.add_rms_norm(x, delta, 1 + rand(x.shape[1], seed=5), 1e-5, out)
    return out


def test_add_rms_norm_matches_torch(compiled: CompiledKernels, dtype: torch.dtype) -> None:
    delta = rand(7, 576, seed=1).to(dtype)
    mine, theirs = rand(7, 576), rand(7, 576)
    result = normed(compiled, mine, delta, dtype), normed(TorchKernels(), theirs, delta, dtype)
    torch.testing.assert_close(*result, **TOLERANCE[dtype])
    assert torch.equal(mine, theirs), "the residual is a plain sum"


def test_silu_mul_matches_torch_far_from_zero_too(compiled: CompiledKernels, dtype: torch.dtype) -> None:
    gate_up = (rand(5, 2 * 96) * torch.logspace(-3, 2, 5)[:, None]).to(dtype)
    mine, theirs = torch.empty(2, 5, 96, dtype=dtype)
    compiled.silu_mul(gate_up, mine)
    TorchKernels().silu_mul(gate_up, theirs)
    torch.testing.assert_close(mine, theirs, **TOLERANCE[dtype])


def attention_case(
    head_dim: int, group: int, context_lens: list[int], counts: list[int]
) -> tuple[ForwardBatch, int]:
    """A ragged batch whose sequences lie in shuffled blocks -> batch, number of blocks."""
    sizes = [-(-context // BLOCK_SIZE) for context in context_lens]
    blocks = np.random.default_rng(0).permutation(sum(sizes))
    starts = np.cumsum([0, *sizes])
    items = [
        BatchItem(np.zeros(count, np.int64), context - count, blocks[start : start + size].tolist(), 0)
        for context, count, start, size in zip(context_lens, counts, starts, sizes, strict=False)
    ]
    return build_forward_batch(items, BLOCK_SIZE), sum(sizes)


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_matches_torch(
    compiled: CompiledKernels, dtype: torch.dtype, head_dim: int, group: int, qk_norm: bool
) -> None:
    config = tiny_config(head_dim=head_dim, num_heads=2 * group, num_kv_heads=2)
    batch, num_blocks = attention_case(head_dim, group, [1, 64, 65, 130], [1, 3, 1, 20])
    qkv = (2 * rand(batch.num_rows, (2 * group + 4) * head_dim)).to(dtype)
    norms = HeadNorms(1 + rand(head_dim, seed=1) / 8, 1 + rand(head_dim, seed=2) / 8) if qk_norm else None
    results, memories = [], []
    kernels: LayerKernels
    # The reference computes in float32: in bfloat16 torch rounds the scores, the compiled kernel does not.
    for kernels, precision in ((compiled, dtype), (TorchKernels(), torch.float32)):
        cache = KvCache(config, precision, num_blocks, BLOCK_SIZE)
        cache.memory.copy_(rand(*cache.memory.shape, seed=3).to(dtype))
        out = torch.zeros(batch.num_rows, 2 * group * head_dim, dtype=precision)
        rotary = build_rotary(config, 256)
        kernels.prepare_attention(config, batch, cache, rotary)(1, qkv.to(precision), norms, out)
        results.append(out.float())
        memories.append(cache.memory.float())
    torch.testing.assert_close(*results, **TOLERANCE[dtype])
    torch.testing.assert_close(*memories, **TOLERANCE[dtype])
    assert torch.equal(memories[0][0], memories[1][0]), "other layers are left alone"


def test_rows_of_each_kernel_do_not_know_their_neighbours(kernels: LayerKernels, dtype: torch.dtype) -> None:
    x, gate_up = rand(300, 576), rand(300, 2 * 96).to(dtype)
    together = normed(kernels, x.clone(), None, dtype)
    activated = torch.empty(300, 96, dtype=dtype)
    kernels.silu_mul(gate_up, activated)
    for row in (0, 1, 150, 299):
        assert torch.equal(normed(kernels, x[row : row + 1].clone(), None, dtype)[0], together[row])
        alone = torch.empty(1, 96, dtype=dtype)
        kernels.silu_mul(gate_up[row : row + 1], alone)
        assert torch.equal(alone[0], activated[row])


def test_the_process_keeps_one_openmp_runtime(compiled: CompiledKernels) -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert any(compiled.name in line for line in maps)
    assert len({line.split()[-1] for line in maps if "libgomp" in line}) == 1


def test_a_second_build_is_served_from_the_cache(tmp_path: Path) -> None:
    source = tmp_path / "tiny.cpp"
    source.write_text('extern "C" int one() { return 1; }')
    cache = tmp_path / "cache"
    first = build_library(source, cache)
    stamp = first.stat().st_mtime_ns
    assert build_library(source, cache).stat().st_mtime_ns == stamp
    assert list(cache.iterdir()) == [first], "no half-built files are left"
    source.write_text('extern "C" int one() { return 2; }')
    assert build_library(source, cache) != first


def test_what_the_compiler_said_is_in_the_error(tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int one( {")
    with pytest.raises(KernelBuildError, match=r"broken\.cpp:1"):
        build_library(source, tmp_path)


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    source = tmp_path / "tiny.cpp"
    source.write_text("")
    with pytest.raises(KernelBuildError, match=str(tmp_path / "file")):
        build_library(source, tmp_path / "file")


def test_without_a_compiler_torch_kernels_are_chosen_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        kernels = choose_kernels(FAMILIES["llama"])
    assert kernels.name.startswith("torch-inv-")
    assert re.search(r"back to kernels .torch-inv-.*, which are slower: there is no g\+\+ on the PATH", caplog.text)
    tokens = random_tokens(40)
    engine = tiny_engine(kernels=kernels)
    assert torch.equal(logits_of(engine, tokens, [1] * 20), logits_of(engine, tokens))


@pytest.mark.parametrize(("field", "value"), [("head_dim", 48), ("hidden_size", 72), ("intermediate_size", 100)])
def test_sizes_the_compiled_kernels_lack_are_named(
    field: str, value: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        kernels = choose_kernels(tiny_config(**{field: value}))
    assert kernels.name.startswith("torch-inv-")
    assert f"{field} {value}" in caplog.text
