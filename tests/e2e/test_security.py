"""Three processes with TLS at the edge, mutual TLS inside and tokens, as the page of security says."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from draft_service.__main__ import main as draft_main
from orchestrator.__main__ import main as orchestrator_main
from tandem.cli import app
from tandem.client import Credentials, DeadlineExceededError, SyncTandemClient, UnauthenticatedError
from tandem.processes import ServiceProcess, service_command, wait_ready
from target_service.__main__ import main as target_main
from tests.certificates import Authority, Pair

TOKEN = "shop-0123456789abcdef"


def listening(pair: Pair, client_ca: Path | None = None) -> list[str]:
    """The options of a service with this certificate."""
    mutual = [] if client_ca is None else ["--tls-client-ca", str(client_ca)]
    return ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key), *mutual, "--address", "127.0.0.1:0"]


def dialing(authority: Authority, pair: Pair | None = None) -> list[str]:
    """The options of whoever calls a service of this authority's."""
    mutual = [] if pair is None else ["--tls-client-cert", str(pair.cert), "--tls-client-key", str(pair.key)]
    return ["--tls-ca", str(authority.ca), *mutual]


@dataclass
class Secured:
    """Running services, what they log, and what it takes to call them."""

    folder: Path
    services: dict[str, ServiceProcess]
    inside: Authority
    edge: Authority
    token_file: Path
    own: Pair  # the orchestrator's certificate inside

    def start(self, service: str, *arguments: str) -> ServiceProcess:
        """Its log goes to a file."""
        ready = self.folder / f"{service}.ready"
        command = service_command(service, [*arguments, "--ready-file", str(ready), "--log-level", "DEBUG"])
        with self.log_of(service).open("wb") as log:
            process = subprocess.Popen([*command, "--stop-at-eof"], stdin=subprocess.PIPE, stderr=log)
        self.services[service] = ServiceProcess(service, process, ready)
        return self.services[service]

    def log_of(self, service: str) -> Path:
        return self.folder / f"{service}.log"

    @property
    def address(self) -> str:
        return self.services["orchestrator"].address

    def credentials(self, token: str | None = TOKEN) -> Credentials:
        return Credentials(self.edge.ca, token=token)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    inside, edge = Authority(folder, "inside"), Authority(folder, "edge")
    tokens, token_file = folder / "tokens", folder / "token"
    tokens.write_text(f"shop {TOKEN}\n")
    token_file.write_text(TOKEN + "\n")
    for path in (tokens, token_file):
        path.chmod(0o600)
    running = Secured(folder, {}, inside, edge, token_file, inside.issue("orchestrator"))
    try:
        models = [
            running.start(
                "target",
                *listening(inside.issue("target"), inside.ca),
                "--toy",
                "hashed:vocab=64,seed=3,delay_ms=5",
            ),
            running.start("draft", *listening(inside.issue("draft"), inside.ca), "--proposer", "ngram"),
        ]
        wait_ready(models, 120)
        links = ["--target", models[0].address, "--draft", models[1].address, *dialing(inside, running.own)]
        front = [*listening(edge.issue("front")), "--tokens-file", str(tokens), "--toy-vocab", "64"]
        wait_ready([running.start("orchestrator", *front, *links)], 120)
        yield running
    finally:
        for service in reversed(running.services.values()):
            service.stop(10)


def tandem(*arguments: str, token: str = "") -> Result:
    """What a command does in this process, with a token in the environment or none."""
    return CliRunner().invoke(app, arguments, env={"TANDEM_TOKEN": token})


def test_a_client_with_the_authority_and_a_token_is_served_by_all_three(secured: Secured) -> None:
    with SyncTandemClient(secured.address, credentials=secured.credentials()) as client:
        answer = client.complete("abcabcabc", max_tokens=24, temperature=0.0, ignore_eos=True)
        again = client.complete("abcabcabc", max_tokens=24, temperature=0.0, ignore_eos=True, speculation=False)
        assert [(one.role, one.is_connected) for one in client.info().replicas] == [
            ("target", True),
            ("draft", True),
        ]
    assert answer.num_completion_tokens == 24
    assert answer.token_ids == again.token_ids


def test_no_token_and_a_wrong_one_are_unauthenticated(secured: Secured) -> None:
    for token, message in ((None, "no token was given"), (TOKEN + "x", "the token is not known here")):
        with (
            SyncTandemClient(secured.address, credentials=secured.credentials(token)) as client,
            pytest.raises(UnauthenticatedError, match=message),
        ):
            client.complete("abc")


def test_commands_take_the_token_from_a_file_or_the_environment(secured: Secured) -> None:
    reach = ["--address", secured.address, *dialing(secured.edge)]
    for found in (
        tandem("generate", "abc", *reach, "--max-tokens", "4", token=TOKEN),
        tandem("status", *reach, "--token-file", str(secured.token_file)),
        tandem("health", *reach),
    ):
        assert (found.exit_code, found.stderr) == (0, "")
    looked = tandem("doctor", *reach, token=TOKEN)
    assert f"OK       {secured.address}: says SERVING" in looked.stdout
    assert f"PROBLEM  {secured.address}" not in looked.stdout
    assert f"PROBLEM  {secured.address}: UNAUTHENTICATED: no token was given" in tandem("doctor", *reach).stdout
    refused = tandem("status", *reach)
    assert refused.exit_code == 2
    assert refused.stderr.startswith("tandem: UNAUTHENTICATED: no token was given")
    wrong = tandem("generate", "abc", *reach, "--token-file", str(secured.edge.ca))
    assert wrong.exit_code == 2
    assert f"--token-file {secured.edge.ca}: holds" in wrong.stderr


def test_inside_only_certificates_of_the_authority_are_let_in(secured: Secured) -> None:
    stranger = Authority(secured.folder, "stranger").issue("orchestrator")
    for service in ("target", "draft"):
        reach = ["--address", secured.services[service].address]
        let_in = tandem("health", *reach, *dialing(secured.inside, secured.own))
        assert (let_in.exit_code, let_in.stdout) == (0, "SERVING\n")
        for options, message in (
            ([], "--tls-ca asks for that"),
            (dialing(secured.inside), "it may want a client certificate"),
            (dialing(secured.inside, stranger), "it may not accept the certificate"),
            (dialing(secured.edge, secured.own), "not signed by an authority of --tls-ca"),
        ):
            refused = tandem("health", *reach, *options)
            assert refused.exit_code == 1
            assert refused.stderr.startswith("tandem: UNAVAILABLE: no Tandem service answers at")
            assert message in refused.stderr


def test_an_orchestrator_without_a_certificate_does_not_start_and_says_why(
    secured: Secured, capsys: pytest.CaptureFixture[str]
) -> None:
    target = secured.services["target"].address
    arguments = ["--target", target, "--toy-vocab", "64", "--address", "127.0.0.1:0", "--connect-timeout", "0.5"]
    for options, message in (
        ([], "as a service with TLS does; --tls-ca asks for that"),
        (dialing(secured.inside), "it may want a client certificate, --tls-client-cert"),
    ):
        assert orchestrator_main([*arguments, *options]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(f"orchestrator: cannot start: target service at {target} is not reachable: ")
        assert message in last


def test_the_log_has_the_name_of_a_token_and_no_secret(secured: Secured) -> None:
    with (
        SyncTandemClient(secured.address, credentials=secured.credentials()) as client,
        pytest.raises(DeadlineExceededError),
    ):
        client.complete("abc", request_id="late", max_tokens=200, ignore_eos=True, timeout=0.4)
    with (
        SyncTandemClient(secured.address, credentials=secured.credentials(TOKEN[:-1])) as client,
        pytest.raises(UnauthenticatedError),
    ):
        client.complete("abc")
    logs = {service: secured.log_of(service).read_text() for service in secured.services}
    (late,) = [line for line in logs["orchestrator"].splitlines() if "status=DEADLINE_EXCEEDED" in line]
    assert "request_id='late'" in late
    assert "caller=shop" in late
    assert "refused /tandem.orchestrator.v1.OrchestratorService/Generate of ipv4:127.0.0.1:" in logs["orchestrator"]
    for text in logs.values():
        assert TOKEN[:-1] not in text
        assert "PRIVATE KEY" not in text
    arguments = [part for service in secured.services.values() for part in map(str, service.process.args)]  # type: ignore[arg-type]
    assert not [part for part in arguments if TOKEN in part]


@pytest.mark.parametrize("main", [target_main, draft_main, orchestrator_main])
def test_tls_files_that_cannot_be_used_end_every_start_in_one_line(
    main: object, secured: Secured, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(main)
    pair, other = secured.own, secured.inside.issue("other")
    needed = {
        target_main: ["--toy", "hashed:vocab=64"],
        draft_main: ["--proposer", "ngram"],
        orchestrator_main: ["--target", "127.0.0.1:1", "--toy-vocab", "64"],
    }
    for options, message in (
        (["--tls-cert", str(pair.cert)], f"--tls-cert {pair.cert}: needs its key as well, --tls-key FILE"),
        (["--tls-key", str(pair.key)], f"--tls-key {pair.key}: needs its certificate as well"),
        (["--tls-cert", "/none", "--tls-key", str(pair.key)], "--tls-cert /none: cannot be read"),
        (["--tls-cert", str(pair.cert), "--tls-key", str(other.key)], f"--tls-key {other.key}: does not belong"),
        (["--tls-client-ca", str(secured.inside.ca)], "--tls-client-ca"),
        ([*listening(pair), "--insecure"], "--insecure accepts clear text and --tls-cert ends it"),
    ):
        assert main([*needed[main], *options]) == 2  # type: ignore[index]
        last = capsys.readouterr().err.splitlines()[-1]
        assert ": cannot start: " in last
        assert message in last


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tls-ca", "/none"], "--tls-ca /none: cannot be read"),
        (["--tls-server-name", "x"], "--tls-server-name x: needs --tls-ca FILE"),
        (["--tokens-file", "/none"], "--tokens-file /none: cannot be read"),
    ],
)
def test_what_the_orchestrator_alone_is_given_is_checked_at_start_too(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert orchestrator_main(["--target", "127.0.0.1:1", "--toy-vocab", "64", *options]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("orchestrator: cannot start: ")
    assert message in last


def test_the_tokens_file_may_be_named_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_TOKENS_FILE", "/none")
    assert orchestrator_main(["--target", "127.0.0.1:1", "--toy-vocab", "64"]) == 2
    assert "--tokens-file /none: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "status"])
def test_no_command_sends_a_token_in_clear_text_elsewhere(command: str) -> None:
    words = ["x"] if command == "generate" else []
    refused = tandem(command, *words, "--address", "192.0.2.1:1", token=TOKEN)
    assert refused.exit_code == 2
    assert "the token would travel in clear text to 192.0.2.1:1" in refused.stderr
    assert TOKEN not in refused.stderr
