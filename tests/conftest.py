"""No test asserts a timing: machines are shared, and a property holds however long its check took."""

import os

from hypothesis import settings

# Triton reads it where a kernel is defined, its own ones too, and transformers imports those: so before any test does.
# TRITON_INTERPRET=0 on a machine with a GPU runs the kernels there (tests/sampling/interpreted.py).
os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")
