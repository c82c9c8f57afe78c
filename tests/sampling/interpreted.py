"""The Triton kernels as tests run them: in Triton's interpreter, or on a GPU with TRITON_INTERPRET=0."""

import os

import torch
import triton
import triton.language as tl

from engine.sampling import noise_triton, rejection_triton

DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")

__all__ = ["DEVICE", "noise_triton", "rejection_triton", "tl", "triton"]
