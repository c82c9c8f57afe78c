"""Loading GGUF files."""

import hashlib
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from engine.models.config import LoadedModel, ModelFileError
from engine.models.dequantize import to_torch
from engine.models.loading import load_model
from tests.fixtures.tiny_gguf import write_gguf
from tests.fixtures.tiny_models import CONFIGS, tiny_model

# Of transformers' state dict of the demo model: names sorted, each name's UTF-8 and its float32 bytes.
DEMO_WEIGHTS_SHA256 = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_comes_back_as_it_was_written(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)

    loaded = load_model(write_gguf(tmp_path / "m.gguf", model))

    expected_family = "llama" if family.startswith(("llama", "mistral")) else family
    assert loaded.config.family == expected_family
    assert loaded.config.head_dim == model.config.head_dim
    assert loaded.config.rms_norm_eps == model.config.rms_norm_eps
    assert loaded.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert (loaded.config.attention_bias, loaded.config.qk_norm) == (
        model.config.attention_bias,
        model.config.qk_norm,
    )
    assert set(loaded.weights) == set(model.weights)
    assert all(torch.equal(loaded.weights[name], weight) for name, weight in model.weights.items())


@pytest.mark.parametrize("kind", [Type.Q4_1, Type.Q8_0, Type.Q4_0, Type.Q5_1, Type.F32, Type.F16, Type.BF16])
def test_decoding_a_tensor_is_bit_identical_to_the_gguf_package(kind: Type) -> None:
    values = np.random.RandomState(3).standard_normal((6, 96)).astype(np.float32)
    data = gguf.quants.quantize(values, kind)
    flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)

    decoded = to_torch(flat, kind.value, (6, 96))

    assert torch.equal(decoded.float(), torch.from_numpy(gguf.quants.dequantize(data, kind).astype(np.float32)))
    assert decoded.dtype == {Type.F16: torch.float16, Type.BF16: torch.bfloat16}.get(kind, torch.float32)


def test_a_quantised_file_is_loaded_as_float32(tmp_path: Path) -> None:
    model = tiny_model("llama")
    types = {name: Type.Q4_1 for name in model.weights if "proj" in name} | {"model.embed_tokens.weight": Type.Q8_0}

    loaded = load_model(write_gguf(tmp_path / "m.gguf", model, types))

    for name, weight in model.weights.items():
        assert loaded.weights[name].dtype == torch.float32
        assert torch.allclose(loaded.weights[name], weight, atol=0.06), name


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", tiny_model("llama"))
    assert load_model(tmp_path).config == CONFIGS["llama"]

    write_gguf(tmp_path / "b.gguf", tiny_model("llama"))
    with pytest.raises(ModelFileError, match=r"holds 2 \.gguf files; name one"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.rope.scaling.type": "linear"}, "scaled rotary positions .linear"),
        ({"llama.attention.sliding_window": 64}, "sliding-window attention .64 tokens"),
        ({"llama.expert_count": 4}, "mixture-of-experts"),
        ({"llama.rope.dimension_count": 8}, "rotary positions on 8 of 16 dimensions"),
    ],
)
def test_what_the_forward_lacks_is_refused_by_name(
    metadata: dict[str, int | float | str], named: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), metadata=metadata)

    with pytest.raises(ModelFileError, match=named) as refused:
        load_model(path)
    assert str(path) in str(refused.value)


def test_another_architecture_and_missing_or_extra_tensors_are_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    other = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    other.add_block_count(1)
    other.write_header_to_file()
    other.write_kv_data_to_file()
    other.close()
    with pytest.raises(ModelFileError, match="architecture 'mamba' is not supported"):
        load_model(tmp_path / "other.gguf")

    for missing in ("model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"):
        rest = {name: weight for name, weight in model.weights.items() if name != missing}
        path = write_gguf(tmp_path / "missing.gguf", LoadedModel(model.config, rest))
        with pytest.raises(ModelFileError, match=r"missing\.gguf: .*missing"):
            load_model(path)

    extra = {**model.weights, "model.layers.0.self_attn.v_proj.bias": torch.zeros(32)}
    path = write_gguf(tmp_path / "extra.gguf", LoadedModel(model.config, extra))
    with pytest.raises(ModelFileError, match=r"v_proj\.bias is not part of a llama model"):
        load_model(path)


def test_a_file_cut_anywhere_is_refused_and_named(tmp_path: Path) -> None:
    complete = write_gguf(tmp_path / "m.gguf", tiny_model("llama")).read_bytes()
    cut = tmp_path / "cut.gguf"
    for num_bytes in [*range(0, 64, 3), *range(64, len(complete) - 1, len(complete) // 97), len(complete) - 64]:
        cut.write_bytes(complete[:num_bytes])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            load_model(cut)


def test_damaged_headers_are_refused_and_named(tmp_path: Path) -> None:
    complete = bytearray(write_gguf(tmp_path / "m.gguf", tiny_model("llama")).read_bytes())
    damaged = tmp_path / "damaged.gguf"
    for position, value in [(0, 0x58), (4, 9), (15, 0x7F), (23, 0x7F), (24, 0xFF), (31, 0x7F)]:
        content = complete.copy()
        content[position] = value
        damaged.write_bytes(content)
        with pytest.raises(ModelFileError, match=r"damaged\.gguf"):
            load_model(damaged)


@pytest.mark.model
def test_the_demo_model_is_bit_identical_to_transformers_weights(demo_dir: Path) -> None:
    loaded = load_model(demo_dir)

    digest = hashlib.sha256()
    for name in sorted(loaded.weights):
        digest.update(name.encode())
        digest.update(loaded.weights[name].contiguous().numpy().tobytes())
    assert digest.hexdigest() == DEMO_WEIGHTS_SHA256
    assert loaded.config.num_layers == 30
    assert loaded.config.tie_word_embeddings
