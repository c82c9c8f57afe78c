"""Fixtures of the model-file tests."""

from pathlib import Path

import pytest

from tests.fixtures.demo_model import demo_model_dir


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The pulled demo model's directory."""
    return demo_model_dir()
