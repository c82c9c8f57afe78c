"""TLS files: what cannot be used is refused when a service or a client is made, by option and file."""

import logging
import os
from pathlib import Path

import pytest

from tandem.client import Credentials, CredentialsError, SyncTandemClient, TandemClient
from tandem.serving.channels import AddressError, check_bind_address
from tandem.serving.dialer import Dialer
from tandem.serving.server_tls import read_server_tls
from tests.certificates import Authority, Pair


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.issue("server")


def test_without_files_there_is_no_tls_and_with_them_the_key_is_never_shown(
    authority: Authority, pair: Pair
) -> None:
    assert read_server_tls(None, None, None) is None
    tls, mutual = read_server_tls(pair.cert, pair.key, None), read_server_tls(pair.cert, pair.key, authority.ca)
    assert tls is not None
    assert mutual is not None
    assert (tls.is_mutual, mutual.is_mutual) == (False, True)
    assert "KEY" not in repr(mutual)


def test_half_of_a_pair_is_refused_and_both_options_are_named(authority: Authority, pair: Pair) -> None:
    with pytest.raises(CredentialsError, match=rf"--tls-cert {pair.cert}: needs .* --tls-key FILE"):
        read_server_tls(pair.cert, None, None)
    with pytest.raises(CredentialsError, match=rf"--tls-key {pair.key}: needs .* --tls-cert FILE"):
        read_server_tls(None, pair.key, None)
    with pytest.raises(CredentialsError, match=rf"--tls-client-ca {authority.ca}: needs --tls-cert"):
        read_server_tls(None, None, authority.ca)
    with pytest.raises(CredentialsError, match=rf"--tls-client-cert {pair.cert}: needs .* --tls-client-key"):
        Dialer(Credentials(tls_ca=authority.ca, tls_client_cert=pair.cert))
    with pytest.raises(CredentialsError, match=rf"--tls-client-cert {pair.cert}: needs --tls-ca FILE"):
        Dialer(Credentials(tls_client_cert=pair.cert, tls_client_key=pair.key))
    with pytest.raises(CredentialsError, match="--tls-server-name here: needs --tls-ca FILE"):
        Dialer(Credentials(tls_server_name="here"))


def test_files_that_are_not_there_or_hold_something_else_are_refused_by_option_and_name(
    authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    missing, text, pipe = tmp_path / "missing", tmp_path / "text", tmp_path / "pipe"
    os.mkfifo(pipe)
    text.write_text("hello")
    cases = [
        ((missing, pair.key, None), f"--tls-cert {missing}: cannot be read: No such file"),
        ((pair.cert, missing, None), f"--tls-key {missing}: cannot be read: No such file"),
        ((pair.cert, pair.key, missing), f"--tls-client-ca {missing}: cannot be read: No such file"),
        ((pair.cert, tmp_path, None), f"--tls-key {tmp_path}: cannot be read: Is a directory"),
        ((pipe, pair.key, None), f"--tls-cert {pipe}: is not a regular file"),
        ((pair.cert, pipe, None), f"--tls-key {pipe}: is not a regular file"),
        ((text, pair.key, None), f"--tls-cert {text}: holds no certificate"),
        ((pair.cert, text, None), f"--tls-key {text}: holds no private key"),
        ((pair.cert, pair.cert, None), f"--tls-key {pair.cert}: holds no private key"),
        ((pair.cert, pair.key, text), f"--tls-client-ca {text}: holds no certificate"),
    ]
    for files, message in cases:
        with pytest.raises(CredentialsError, match=message):
            read_server_tls(*files)
    with pytest.raises(CredentialsError, match=f"--tls-ca {text}: holds no certificate"):
        Dialer(Credentials(tls_ca=text))


def test_a_key_of_another_certificate_or_behind_a_passphrase_is_refused(authority: Authority, pair: Pair) -> None:
    other, locked = authority.issue("other"), authority.issue("locked", passphrase=b"open sesame")
    with pytest.raises(CredentialsError, match=rf"--tls-key {other.key}: does not belong to .* {pair.cert}"):
        read_server_tls(pair.cert, other.key, None)
    with pytest.raises(CredentialsError, match=rf"--tls-key {locked.key}: is protected by a passphrase"):
        read_server_tls(locked.cert, locked.key, None)
    with pytest.raises(CredentialsError, match=rf"--tls-client-key {other.key}: does not belong"):
        Dialer(Credentials(authority.ca, pair.cert, other.key))


def test_a_key_that_everybody_can_read_is_warned_of(
    authority: Authority, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    open_pair = authority.issue("open")
    open_pair.key.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        read_server_tls(pair.cert, pair.key, None)
        assert caplog.text == ""
        read_server_tls(open_pair.cert, open_pair.key, None)
    assert f"--tls-key {open_pair.key} can be read by every user" in caplog.text


def test_tls_allows_any_address_and_clear_text_asked_for_as_well_is_a_contradiction() -> None:
    check_bind_address("0.0.0.0:1", insecure=False, has_tls=True)
    check_bind_address("127.0.0.1:1", insecure=False, has_tls=True)
    for address in ("0.0.0.0:1", "127.0.0.1:1"):
        with pytest.raises(AddressError, match=r"--insecure .* --tls-cert .* leave one of them out"):
            check_bind_address(address, insecure=True, has_tls=True)


@pytest.mark.parametrize("client", [TandemClient, SyncTandemClient])
def test_a_token_leaves_this_machine_only_in_tls_or_when_clear_text_is_accepted(
    client: type[TandemClient | SyncTandemClient], authority: Authority
) -> None:
    token = "a-secret-of-some-length"
    with pytest.raises(CredentialsError, match=r"clear text to 10\.0\.0\.1:1.*--tls-ca .*--insecure") as caught:
        client("127.0.0.1:1,10.0.0.1:1", credentials=Credentials(token=token))
    assert token not in str(caught.value)
    assert token not in repr(Credentials(token=token))
    for credentials, address in [
        (Credentials(token=token), "127.0.0.1:1,localhost:2,[::1]:3"),
        (Credentials(token=token, insecure=True), "10.0.0.1:1"),
        (Credentials(token=token, tls_ca=authority.ca), "10.0.0.1:1"),
        (Credentials(), "10.0.0.1:1"),
    ]:
        made = client(address, credentials=credentials)
        if isinstance(made, SyncTandemClient):
            made.close()


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "umläut"])
def test_a_token_that_no_header_can_hold_is_refused_without_being_repeated(token: str) -> None:
    with pytest.raises(CredentialsError, match="the token is empty, or has spaces") as caught:
        Dialer(Credentials(token=token))
    assert not token or token not in str(caught.value)
