"""The bearer tokens of applications: a file of names and tokens, read again whenever it changes."""

import datetime
import hashlib
import hmac
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.serving.pem import CredentialsError, WatchedFiles, read_regular_file, warn_if_readable_by_others

_log = logging.getLogger(__name__)

MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 1024  # a header's limit is a few kilobytes
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)  # it stands in logs
_TOKEN = re.compile(rf"[\x21-\x7e]{{{MIN_TOKEN_CHARS},{MAX_TOKEN_CHARS}}}")  # what a header may hold
_OPTION = "--tokens-file"


class UnknownTokenError(Exception):
    """A token that lets nobody in; the message says why, without it."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    digest: bytes  # of the token, which itself is not kept
    expires_at: datetime.datetime | None


class TokensFile:
    """Lines of NAME TOKEN [EXPIRES]; those that are empty or begin with # say nothing.

    A name may have several tokens, so that one can follow another; a token has one name. EXPIRES is an ISO 8601 date or
    time, in UTC unless it says otherwise.
    """

    def __init__(self, path: Path, now: Callable[[], datetime.datetime] | None = None) -> None:
        """CredentialsError, naming file and line, for what cannot be used. `now`: aware."""
        self._path = path
        self._now = now or (lambda: datetime.datetime.now(datetime.UTC))
        self._files = WatchedFiles(path)
        self._entries = self._read()

    def name_of(self, token: str) -> str:
        """Whose it is; UnknownTokenError for one that is unknown or has expired."""
        self._refresh()
        presented = _digest(token)
        found: _Entry | None = None
        for entry in self._entries:  # to the end: the time says nothing about which it was
            if hmac.compare_digest(entry.digest, presented):
                found = entry
        if found is None:
            raise UnknownTokenError("the token is not known here")
        if found.expires_at is not None and found.expires_at <= self._now():
            raise UnknownTokenError(f"the token of {found.name} expired at {found.expires_at.isoformat()}")
        return found.name

    def _refresh(self) -> None:
        """Read the file again if it has changed; while it cannot be used, what it said before holds."""
        if not self._files.have_changed():
            return
        try:
            self._entries = self._read()
        except CredentialsError as error:
            _log.error("%s; the %d tokens of before still hold", error, len(self._entries))
        else:
            _log.info("%s %s: read again, %d tokens", _OPTION, self._path, len(self._entries))

    def _read(self) -> tuple[_Entry, ...]:
        try:
            lines = read_regular_file(_OPTION, self._path).decode().splitlines()
        except UnicodeDecodeError as error:
            raise CredentialsError(f"{_OPTION} {self._path}: is not UTF-8 text") from error
        warn_if_readable_by_others(_OPTION, self._path)
        entries: dict[bytes, _Entry] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            where = f"{_OPTION} {self._path} line {number}"
            entry = _entry(words, where)
            if entry.digest in entries:
                raise CredentialsError(f"{where}: the token of {entry.name} is that of an earlier line as well")
            entries[entry.digest] = entry
        if not entries:
            _log.warning("%s %s names nobody: every call is refused", _OPTION, self._path)
        return tuple(entries.values())


def _entry(words: list[str], where: str) -> _Entry:
    """One line; CredentialsError, without the token, for what it cannot be."""
    if not 2 <= len(words) <= 3:
        raise CredentialsError(f"{where}: has {len(words)} words and not NAME TOKEN or NAME TOKEN EXPIRES")
    name, token = words[:2]
    if not _NAME.fullmatch(name):
        raise CredentialsError(
            f"{where}: the name is not 1 to 64 letters, digits, dots, hyphens, @ and underscores"
        )
    if not _TOKEN.fullmatch(token):
        raise CredentialsError(
            f"{where}: the token of {name} is not {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} printable ASCII characters"
        )
    return _Entry(name, _digest(token), _time(words[2], f"{where}: {name}") if len(words) == 3 else None)


def _time(text: str, where: str) -> datetime.datetime:
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise CredentialsError(
            f"{where} expires at what is no ISO 8601 date or time, such as 2030-01-31T12:00:00Z"
        ) from None
    return time if time.tzinfo is not None else time.replace(tzinfo=datetime.UTC)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
