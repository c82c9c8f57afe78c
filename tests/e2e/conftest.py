"""Deployments that the end-to-end tests share; each is started once."""

from collections.abc import Iterator

import pytest

from tests.e2e.deployment import Deployment, deployment, real_model
from tests.fixtures.demo_model import demo_model_dir


@pytest.fixture(scope="session")
def float32() -> Iterator[Deployment]:
    """The demo model in float32."""
    demo_model_dir()
    with real_model("float32") as running:
        yield running


@pytest.fixture(scope="session")
def bfloat16() -> Iterator[Deployment]:
    """The demo model in bfloat16."""
    demo_model_dir()
    with real_model("bfloat16") as running:
        yield running


@pytest.fixture(scope="session")
def toy() -> Iterator[Deployment]:
    """Toy engines: the same processes and wire, no model files."""
    options = "hashed:vocab=512,seed=3"
    with deployment(["--toy", options], ["--toy-vocab", "512"]) as running:
        yield running
