"""The Triton kernels as tests run them: on a GPU where there is one, else in Triton's interpreter."""

import os

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, Triton's own ones too

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from engine.sampling import noise_triton, rejection_triton  # noqa: E402

__all__ = ["DEVICE", "noise_triton", "rejection_triton", "tl", "triton"]
