"""The tokens file: names and tokens, read again when it changes; no message or log ever holds a token."""

import datetime
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.serving.pem import CredentialsError
from tandem.serving.tokens import TokensFile, UnknownTokenError

ALPHA, BETA, GAMMA = "alpha-0123456789abc", "beta-0123456789abcd", "gamma-0123456789abc"
NOON = datetime.datetime(2030, 6, 1, 12, tzinfo=datetime.UTC)


def written(path: Path, text: str) -> Path:
    """The file with this text, always another file than before, as a careful writer makes it."""
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o600)
    return path


def tokens_of(tmp_path: Path, text: str) -> TokensFile:
    return TokensFile(written(tmp_path / "tokens", text), now=lambda: NOON)


def test_a_token_has_a_name_and_a_name_may_have_several(tmp_path: Path) -> None:
    tokens = tokens_of(tmp_path, f"# who may call\n\nshop {ALPHA}\n  shop\t{BETA}  \nbatch {GAMMA}\n")
    assert [tokens.name_of(token) for token in (ALPHA, BETA, GAMMA)] == ["shop", "shop", "batch"]


@pytest.mark.parametrize("token", ["", "x", ALPHA[:-1], ALPHA + "x", ALPHA.upper(), "shop", "umläut-0123456789abc"])
def test_everything_else_is_unknown(tmp_path: Path, token: str) -> None:
    with pytest.raises(UnknownTokenError, match=r"^the token is not known here$"):
        tokens_of(tmp_path, f"shop {ALPHA}").name_of(token)


@pytest.mark.parametrize(
    ("expires", "is_valid"),
    [
        ("2030-06-01T12:00:01Z", True),
        ("2030-06-01T12:00:00Z", False),
        ("2030-06-02", True),
        ("2030-06-01", False),
        ("2030-06-01T12:00:01", True),  # UTC where nothing is said
        ("2030-06-01T13:00:01+01:00", True),
        ("2030-06-01T12:59:59+01:00", False),
    ],
)
def test_a_token_is_valid_until_it_expires(tmp_path: Path, expires: str, is_valid: bool) -> None:
    tokens = tokens_of(tmp_path, f"shop {ALPHA} {expires}")
    if is_valid:
        assert tokens.name_of(ALPHA) == "shop"
        return
    with pytest.raises(UnknownTokenError, match=r"the token of shop expired at 2030-06-01T") as caught:
        tokens.name_of(ALPHA)
    assert ALPHA not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (ALPHA, "has 1 words and not NAME TOKEN"),
        (f"shop {ALPHA} 2030-01-01 more", "has 4 words and not NAME TOKEN"),
        (f"shop/1 {ALPHA}", "the name is not 1 to 64 letters"),
        (f"{'n' * 65} {ALPHA}", "the name is not 1 to 64 letters"),
        ("shop fifteen-0123456", "the token of shop is not 16 to 1024 printable"),
        (f"shop {'x' * 1025}", "the token of shop is not 16 to 1024 printable"),
        (f"shop {ALPHA}ü", "the token of shop is not 16 to 1024 printable"),
        (f"shop {ALPHA} tomorrow", "shop expires at what is no ISO 8601 date or time"),
        (f"shop {GAMMA}", "the token of shop is that of an earlier line as well"),
    ],
)
def test_a_line_that_cannot_be_is_refused_by_number_without_its_token(
    tmp_path: Path, line: str, problem: str
) -> None:
    text = f"# first\nbatch {GAMMA}\n{line}\n"
    with pytest.raises(CredentialsError) as caught:
        tokens_of(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"--tokens-file {tmp_path}/tokens line 3: {problem}")
    assert not [word for word in line.split() if len(word) > 15 and word in message]


def test_a_file_that_cannot_be_read_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match=rf"--tokens-file {tmp_path}/none: cannot be read: No such file"):
        TokensFile(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(CredentialsError, match=rf"--tokens-file {tmp_path}/bytes: is not UTF-8 text"):
        TokensFile(tmp_path / "bytes")


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """One that nobody writes to: whoever opens it waits, until an alarm fails the test."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(20)
    yield path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_pipe_or_a_device_is_refused_at_start(tmp_path: Path, pipe: Path) -> None:
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link", Path("/dev/null")):
        with pytest.raises(CredentialsError, match=rf"--tokens-file {path}: is not a regular file"):
            TokensFile(path)
    with pytest.raises(CredentialsError, match=rf"--tokens-file {tmp_path}: cannot be read: Is a directory"):
        TokensFile(tmp_path)


def test_a_pipe_in_place_of_the_file_keeps_nobody_waiting(
    tmp_path: Path, pipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = tokens_of(tmp_path, f"shop {ALPHA}")
    os.replace(pipe, tmp_path / "tokens")
    assert tokens.name_of(ALPHA) == "shop"
    assert f"--tokens-file {tmp_path}/tokens: is not a regular file" in caplog.text
    assert "the 1 tokens of before still hold" in caplog.text


def test_a_mounted_secret_is_read_through_its_links_and_again_when_they_change(tmp_path: Path) -> None:
    """As in Kubernetes: the file links into ..data, which links to a folder and is replaced by a link to another."""
    for number, token in enumerate((ALPHA, BETA)):
        (tmp_path / f"..{number}").mkdir()
        written(tmp_path / f"..{number}" / "tokens", f"shop {token}")
    (tmp_path / "..data").symlink_to("..0")
    (tmp_path / "tokens").symlink_to(Path("..data", "tokens"))
    tokens = TokensFile(tmp_path / "tokens")
    assert tokens.name_of(ALPHA) == "shop"
    (tmp_path / "..new").symlink_to("..1")
    os.replace(tmp_path / "..new", tmp_path / "..data")
    assert tokens.name_of(BETA) == "shop"


def test_a_changed_file_holds_from_the_next_call_on(tmp_path: Path) -> None:
    tokens = tokens_of(tmp_path, f"shop {ALPHA}")
    written(tmp_path / "tokens", f"shop {BETA}")
    assert tokens.name_of(BETA) == "shop"
    with pytest.raises(UnknownTokenError):
        tokens.name_of(ALPHA)
    replacement = written(tmp_path / "next", f"batch {ALPHA}")
    os.replace(replacement, tmp_path / "tokens")
    assert tokens.name_of(ALPHA) == "batch"


def test_an_emptied_file_lets_nobody_in_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = tokens_of(tmp_path, f"shop {ALPHA}")
    written(tmp_path / "tokens", "# nobody\n")
    with pytest.raises(UnknownTokenError):
        tokens.name_of(ALPHA)
    assert "names nobody: every call is refused" in caplog.text


@pytest.mark.parametrize("text", [None, f"shop {BETA}\nbroken\n"])
def test_a_file_that_can_no_longer_be_used_is_an_error_in_the_log_and_the_known_tokens_hold(
    tmp_path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    tokens = tokens_of(tmp_path, f"shop {ALPHA}")
    path.unlink() if text is None else written(path, text)
    for _ in range(3):
        assert tokens.name_of(ALPHA) == "shop"
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert f"--tokens-file {path}" in record.getMessage()
    assert "the 1 tokens of before still hold" in record.getMessage()
    written(path, f"shop {GAMMA}")
    assert tokens.name_of(GAMMA) == "shop"
    assert not [token for token in (ALPHA, BETA, GAMMA) if token in caplog.text]


def test_a_file_that_everybody_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens_of(tmp_path, f"shop {ALPHA}")
    assert caplog.text == ""
    (tmp_path / "tokens").chmod(0o604)
    TokensFile(tmp_path / "tokens")
    assert f"--tokens-file {tmp_path}/tokens can be read by every user" in caplog.text


def test_every_token_is_compared_whichever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_of(tmp_path, f"a {ALPHA}\nb {BETA}\nc {GAMMA}\n")
    compared: list[int] = []
    compare = __import__("hmac").compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return bool(compare(one, other))

    monkeypatch.setattr("tandem.serving.tokens.hmac.compare_digest", counting)
    for token in (ALPHA, BETA, GAMMA):
        tokens.name_of(token)
    with pytest.raises(UnknownTokenError):
        tokens.name_of("nobody's")
    assert compared == [32] * 12
