"""Model files: the named models, bringing one here, finding one, reading a GGUF file's header; free of torch."""

from tandem.models.gguf_header import GgufFileError, GgufHeader, GgufTensor, read_gguf_header
from tandem.models.pull import ModelPullError, PullProgress, PullProgressPrinter, pull_model
from tandem.models.registry import (
    REGISTRY,
    ModelNotFoundError,
    ModelSource,
    default_models_dir,
    is_pulled,
    resolve_model,
)

__all__ = [
    "REGISTRY",
    "GgufFileError",
    "GgufHeader",
    "GgufTensor",
    "ModelNotFoundError",
    "ModelPullError",
    "ModelSource",
    "PullProgress",
    "PullProgressPrinter",
    "default_models_dir",
    "is_pulled",
    "pull_model",
    "read_gguf_header",
    "resolve_model",
]
