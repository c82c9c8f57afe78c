"""The forward of every family against logits recorded from transformers."""

import pytest
import torch

from engine.kernels.base import LayerKernels
from tests.engine.engines import logits_of, tiny_engine
from tests.fixtures.tiny_models import CONFIGS, tiny_logits, tiny_model


@pytest.mark.parametrize("family", [*CONFIGS])
def test_logits_match_transformers(family: str, kernels: LayerKernels) -> None:
    token_ids, recorded = tiny_logits(family)
    engine = tiny_engine(tiny_model(family), kernels=kernels)
    expected = torch.from_numpy(recorded)
    torch.testing.assert_close(logits_of(engine, token_ids, (7, 1, 3)), expected, atol=2e-4, rtol=1e-4)
