"""API keys: find the client of a bearer token.

A key is written `KEY` or `NAME=KEY`; one without a name is called `key-` and the first digits of
its SHA-256. Logs, limits and shares use names, never keys. Jobs and answers belong to the key, not
to its name: a new key under an old name cannot see them.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from carpool.errors import InvalidAPIKey, SettingRejected

_NAMED = re.compile(r"([A-Za-z][A-Za-z0-9._-]{0,31})=(.*[^=].*)")  # not base64 padding
_NAME_ALONE = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,31}=+")


@dataclass(frozen=True, slots=True)
class APIClient:
    """The client of a request."""

    key: str  # name of the API key; "" without keys
    owner: str  # digest of the key: owner of its answers and jobs


KEYLESS = APIClient("", "")
"""The client of a server without keys."""


class Keyring:
    """The keys of a server; they can be reloaded while it runs."""

    def __init__(self, entries: Sequence[str], file: str | None = None) -> None:
        """Read the keys.

        Args:
            entries: keys, with their names or without.
            file: file with more keys, one a line, in UTF-8; empty lines and lines that begin with
                # are skipped.

        Raises:
            SettingRejected: the file cannot be read, a key cannot be sent, two keys have one name,
                or one key has two.
        """
        self._entries, self._file = entries, file
        self._keys: dict[str, bytes] = {}
        self.read()

    def read(self) -> int:
        """Read the file again; returns the number of keys. On an error the old keys stay."""
        entries = [(f"api_key, entry {n}", entry) for n, entry in enumerate(self._entries, start=1)]
        self._keys = parse_keys([_checked(*entry) for entry in [*entries, *_lines(self._file)]])
        return len(self._keys)

    @property
    def names(self) -> list[str]:
        return list(self._keys)

    def client_of(self, token: bytes) -> APIClient:
        """Find the client of a token; without keys, the anonymous client.

        Name and owner come from one reading of the file: a later lookup of one by the other could
        find another client, if the keys were reloaded in between.

        Raises:
            InvalidAPIKey: the token is not a known key.
        """
        keys = self._keys
        if not keys and self._file is None:
            return KEYLESS
        # compares every key, so that the duration leaks nothing
        names = [name for name, key in keys.items() if hmac.compare_digest(token, key)]
        if not token or not names:
            raise InvalidAPIKey("the API key is missing or wrong: send 'authorization: Bearer KEY'")
        return APIClient(names[0], owner_of(token))

    def knows(self, owner: str) -> bool:
        """Return whether an owner's key is still valid."""
        if not self._keys and self._file is None:
            return owner == ""
        return any(owner_of(key) == owner for key in self._keys.values())


def owner_of(key: bytes) -> str:
    """Owner digest of a key, as jobs and cached answers store it."""
    return hashlib.sha256(key).hexdigest()[:16]


def parse_keys(entries: Iterable[str]) -> dict[str, bytes]:
    """Keys by name. A repeated entry counts once; a name with two keys, or a key with two names, is
    refused (SettingRejected): it would be unclear which limits and share apply."""
    keys: dict[str, bytes] = {}
    names: dict[bytes, str] = {}
    for entry in entries:
        match = _NAMED.fullmatch(entry)
        key = (match[2] if match else entry).encode()
        name = match[1] if match else f"key-{hashlib.sha256(key).hexdigest()[:8]}"
        if keys.setdefault(name, key) != key:
            raise SettingRejected(f"api_key: two keys are called {name!r}: give each its own name")
        if names.setdefault(key, name) != name:
            text = f"{names[key]!r} and {name!r}"
            raise SettingRejected(f"api_key: one key is called {text}: give each client its own")
    return keys


def _lines(file: str | None) -> list[tuple[str, str]]:
    """The keys of a file, each with its line number."""
    if file is None:
        return []
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingRejected(f"api_key_file={file!r} cannot be read: {error}") from error
    return [
        (f"api_key_file={file!r}, line {n}", line)
        for n, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]


def _checked(where: str, entry: str) -> str:
    """Check an entry. Errors never show it: it is a secret."""
    entry = entry.strip()
    if " " in entry or not entry.isprintable():
        rule = "write KEY or NAME=KEY, one a line, and comments on lines of their own"
        raise SettingRejected(f"{where}: a key has no spaces or control characters: {rule}")
    if _NAME_ALONE.fullmatch(entry) and len(entry) % 4:  # otherwise it may be base64
        raise SettingRejected(f"{where}: there is no key behind the name: write NAME=KEY")
    return entry
