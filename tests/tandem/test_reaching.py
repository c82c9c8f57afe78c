"""What reaches a service over a network makes no sense with services of `tandem generate`'s own: it is refused."""

import pytest
from typer.testing import CliRunner

from tandem import cli, generate_command
from tandem.processes import ClusterPlan
from tests.certificates import Authority

NOBODY = "127.0.0.1:1"


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Every option of reaching a service, with what it needs to be understood."""
    folder = tmp_path_factory.mktemp("reaching")
    authority, token = Authority(folder), folder / "token"
    pair = authority.issue("application")
    token.touch(0o600)
    token.write_text("word\n")
    mutual = ["--tls-client-cert", str(pair.cert), "--tls-client-key", str(pair.key)]
    return {
        "--tls-ca": ["--tls-ca", str(authority.ca)],
        "--tls-ca, --tls-client-cert, --tls-client-key": ["--tls-ca", str(authority.ca), *mutual],
        "--tls-ca, --tls-server-name": ["--tls-ca", str(authority.ca), "--tls-server-name", "host"],
        "--token-file": ["--token-file", str(token)],
        "--insecure": ["--insecure"],
    }


@pytest.fixture(autouse=True)
def starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(plan: ClusterPlan, quiet: bool = False) -> None:
        raise AssertionError("services were started")

    monkeypatch.setattr(generate_command, "LocalCluster", start)
    monkeypatch.setattr(generate_command, "ORCHESTRATOR_ADDRESS", NOBODY)


def refusal(arguments: list[str]) -> str:
    answer = CliRunner().invoke(cli.app, ["generate", "x", *arguments])
    assert (answer.exit_code, answer.stdout) == (2, ""), answer.exception
    return answer.stderr


@pytest.mark.parametrize(
    "names",
    [
        "--tls-ca",
        "--tls-ca, --tls-client-cert, --tls-client-key",
        "--tls-ca, --tls-server-name",
        "--token-file",
        "--insecure",
    ],
)
def test_it_is_refused_by_name_where_a_call_would_start_services(names: str, values: dict[str, list[str]]) -> None:
    refused = f"tandem: {names} can only be used with running services, and this call would start its own: "
    what_to_do = "; name a running orchestrator by --address\n"
    assert refusal([*values[names], "--toy", "hashed:vocab=9"]) == f"{refused}--toy asks for that{what_to_do}"
    assert refusal(values[names]) == f"{refused}none answers at {NOBODY}{what_to_do}"
