"""The start-up self-test passes where numerics are invariant, and catches, by name, each part that is not."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.backends import torch_loading
from engine.backends.torch_backend import TorchEngine
from engine.backends.torch_loading import load_torch_engine
from engine.batch import ForwardBatch
from engine.kernels.base import HeadNorms, RotaryTable, StepAttention
from engine.kernels.cpu_reference import TorchKernels
from engine.kv.cache import KvCache
from engine.models.config import LoadedModel, ModelConfig
from engine.models.linear import ChunkedLinear, PackedLinear
from engine.models.loading import load_model
from tests.engine.engines import logits_of
from tests.engine.tiny_models import FAMILIES
from tests.fixtures.tiny_models import random_model, write_hf_directory

MODEL = random_model(FAMILIES["llama"])
UNREAD = 1  # a token that the self-test's texts do not have


class BatchDependentLinear(PackedLinear):
    """Adds a trace of the row count to every value."""

    kind = "batch-dependent"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) * (1 + x.shape[0] / 1024)


class BatchDependentKernels(TorchKernels):
    """Attention whose result carries a trace of the number of tokens."""

    name = "batch-dependent"

    def prepare_attention(
        self, config: ModelConfig, batch: ForwardBatch, cache: KvCache, rotary: RotaryTable
    ) -> StepAttention:
        attend = super().prepare_attention(config, batch, cache, rotary)

        def scaled(layer: int, qkv: torch.Tensor, head_norms: HeadNorms | None, out: torch.Tensor) -> None:
            attend(layer, qkv, head_norms, out)
            out.mul_(1 + batch.num_tokens / 64)

        return scaled


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*FAMILIES])
def test_an_invariant_engine_says_it_is_deterministic(family: str, dtype: str) -> None:
    engine = load_torch_engine(random_model(FAMILIES[family]), dtype, num_blocks=8)
    assert engine.capabilities.deterministic
    assert engine.capabilities.dtype == dtype
    assert engine.capabilities.numerics_fingerprint.startswith(f"torch:{dtype}:onednn-packed:cpu-")


def test_the_fingerprint_tells_weights_dtypes_and_kernels_apart() -> None:
    def fingerprint(seed: int = 0, dtype: str = "float32", **options: object) -> str:
        model = random_model(FAMILIES["llama"], seed)
        engine = load_torch_engine(model, dtype, num_blocks=8, **options)  # type: ignore[arg-type]
        return engine.capabilities.numerics_fingerprint

    prints = [
        fingerprint(),
        fingerprint(seed=1),
        fingerprint(dtype="bfloat16"),
        fingerprint(kernels=TorchKernels()),
    ]
    assert len(set(prints)) == 4
    assert fingerprint(max_step_tokens=128) == prints[0]


def test_the_fingerprint_tells_checkpoints_apart_where_the_self_test_does_not_look(tmp_path: Path) -> None:
    model = random_model(FAMILIES["mistral-untied"])
    other = replace(model, weights={name: weight.clone() for name, weight in model.weights.items()})
    other.weights["model.embed_tokens.weight"][UNREAD] *= 1.001

    def engine(checkpoint: LoadedModel) -> TorchEngine:
        return load_torch_engine(load_model(write_hf_directory(tmp_path, checkpoint)), num_blocks=8)

    first, again, second = engine(model), engine(model), engine(other)
    assert torch.equal(logits_of(first, [2, 3, 4]), logits_of(second, [2, 3, 4]))
    assert not torch.equal(logits_of(first, [UNREAD]), logits_of(second, [UNREAD]))
    assert first.capabilities.numerics_fingerprint == again.capabilities.numerics_fingerprint
    assert first.capabilities.numerics_fingerprint != second.capabilities.numerics_fingerprint


def test_the_fingerprint_is_of_what_is_computed_not_of_what_is_stored() -> None:
    def fingerprint(*stored: torch.dtype) -> str:
        weights = dict(MODEL.weights)
        for dtype in stored:
            weights = {name: weight.to(dtype) for name, weight in reversed(weights.items())}
        engine = load_torch_engine(replace(MODEL, weights=weights), "float32", num_blocks=8)
        return engine.capabilities.numerics_fingerprint

    assert fingerprint(torch.bfloat16) == fingerprint(torch.bfloat16, torch.float32) != fingerprint()


def test_packed_linears_that_fail_give_way_to_chunked_ones_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_loading, "PackedLinear", BatchDependentLinear)
    with caplog.at_level(logging.WARNING):
        engine = load_torch_engine(MODEL, num_blocks=8)
    assert (
        "batch-dependent is not row-invariant on this machine: linear 64->160 torch.float32: rows of" in caplog.text
    )
    assert "falling back to linears of kind torch-chunk16" in caplog.text
    assert engine.capabilities.deterministic
    assert ":torch-chunk16:" in engine.capabilities.numerics_fingerprint


def test_a_machine_without_packed_linears_runs_on_chunked_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_loading, "packed_linear_is_available", lambda _: False)
    engine = load_torch_engine(MODEL, num_blocks=8)
    assert engine.capabilities.deterministic
    assert type(engine.model.head) is ChunkedLinear


def test_attention_that_depends_on_the_batch_is_not_called_deterministic(caplog: pytest.LogCaptureFixture) -> None:
    engine = load_torch_engine(MODEL, num_blocks=8, kernels=BatchDependentKernels())
    assert not engine.capabilities.deterministic
    assert "context 256 at 1 threads depends on chunking" in caplog.text
    assert "ragged batches differ from sequences alone" in caplog.text
    assert "the engine is not deterministic" in caplog.text


@pytest.mark.usefixtures("restore_threads")
def test_the_self_test_leaves_the_thread_count_alone() -> None:
    torch.set_num_threads(2)
    load_torch_engine(MODEL, num_blocks=8)
    assert torch.get_num_threads() == 2


def test_a_context_of_one_token_can_be_tested() -> None:
    engine = load_torch_engine(MODEL, num_blocks=8, max_context=1)
    assert engine.capabilities.deterministic
    assert logits_of(engine, [3]).shape == (1, 96)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16", "num_blocks": 8}, "'float16' is unknown, the torch backend has float32, bfloat16"),
        ({"num_blocks": 8, "max_context": 257}, r"max_context 257 is outside the model's 1\.\.256"),
        ({}, "exactly one of num_blocks and kv_memory_bytes"),
        ({"num_blocks": 8, "kv_memory_bytes": 8}, "exactly one of num_blocks and kv_memory_bytes"),
        ({"kv_memory_bytes": 8}, "--kv-memory 8 bytes is less than one block of 8192 bytes"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_torch_engine(MODEL, **options)  # type: ignore[arg-type]


def test_key_value_memory_in_bytes_becomes_whole_blocks() -> None:
    engine = load_torch_engine(MODEL, kv_memory_bytes=8192 * 5 + 100)
    assert engine.kv_usage().total_blocks == 5
