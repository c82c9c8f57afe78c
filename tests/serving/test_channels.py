"""What gRPC says about connections, in fewer words."""

import pytest

from tandem.serving.channels import why_not_connected


@pytest.mark.parametrize(
    ("details", "cause"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
            "Failed to connect to remote host: connect: Connection refused (111)",
            "connect: Connection refused (111)",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv6:%5B::1%5D:1: Failed parsing HTTP/2",
            "Failed parsing HTTP/2",
        ),
        (
            "errors resolving nowhere:5: [field:hostname lookup error:address lookup failed for nowhere:5: "
            "Domain name not found]",
            "Domain name not found",
        ),
        ("DNS resolution failed for nowhere:5: too slow", "DNS resolution failed for nowhere:5: too slow"),
        ("target service at 127.0.0.1:1 is not reachable: Connection refused", None),
        ("Socket closed", None),
    ],
)
def test_the_cause_of_a_failed_connection_is_told_from_everything_else(details: str, cause: str | None) -> None:
    assert why_not_connected(details) == cause
