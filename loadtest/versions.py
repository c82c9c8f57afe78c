"""The versions that a load test's figures depend on."""

import platform
from importlib.metadata import version

_PACKAGES = ("grpcio", "locust", "gevent", "numpy")


def versions_line() -> str:
    """For a report."""
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return f"Python {platform.python_version()}; {packages}; {platform.system()} {platform.release()}."
