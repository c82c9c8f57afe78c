"""What the page of security tells to type works: its certificates fit, and its commands are this build's."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from draft_service.__main__ import build_parser as draft_parser
from orchestrator.__main__ import build_parser as orchestrator_parser
from tandem.credentials import Credentials
from tandem.serving.dialer import Dialer
from tandem.serving.options import dialing_credentials, server_settings
from tandem.serving.tokens import TokensFile
from target_service.__main__ import build_parser as target_parser
from tests.certificates import Authority

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text()
PARSERS = {"target": target_parser, "draft": draft_parser, "orchestrator": orchestrator_parser}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_its_certificates_and_tokens_are_what_its_commands_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    making, running = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    subprocess.run(["bash", "-ec", making], check=True, cwd=tmp_path, capture_output=True, timeout=60)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^tandem serve (\w+) (.*)$", running, re.MULTILINE)
    options = {service: PARSERS[service]().parse_args(words.split()) for service, words in commands}
    assert options.keys() == PARSERS.keys()
    for one in options.values():
        tls = server_settings(one, "any", 1).tls
        assert tls is not None
        assert tls.is_mutual == (one is not options["orchestrator"])
    Dialer(dialing_credentials(options["orchestrator"])).check(options["orchestrator"].target)
    token = Path("token").read_text().strip()
    assert TokensFile(options["orchestrator"].tokens_file).name_of(token) == "trial"
    Dialer(Credentials(tls_ca=Path("ca.pem"), token=token)).check("10.0.0.1:1")


def test_its_python_makes_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Authority(tmp_path).ca.rename("ca.pem")
    Path("token").write_text("a-token-of-some-length\n")
    made: dict[str, object] = {}
    exec(snippet, made)
    client = made["client"]
    assert client.address == "localhost:50050"  # type: ignore[attr-defined]
    client.close()  # type: ignore[attr-defined]


def test_every_test_file_it_names_is_there() -> None:
    root = Path(__file__).resolve().parents[2]
    paths = re.findall(r"`(tests/[\w/]+\.py)`", PAGE)
    assert len(paths) >= 4
    assert [path for path in paths if not (root / path).exists()] == []
