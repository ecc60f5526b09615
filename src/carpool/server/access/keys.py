"""API keys: find the client of a bearer token.

A key is written `KEY` or `NAME=KEY`; one without a name is called `key-` and the first digits of
its SHA-256. Names stand in logs, limits and shares, keys never do. Jobs and answers belong to the
key, not to its name: another key under an old name sees nothing of them.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from carpool.errors import InvalidAPIKey, SettingRejected

_NAMED = re.compile(r"([A-Za-z][A-Za-z0-9._-]{0,31})=(.*[^=].*)")  # no padding of base64
_NAME_ALONE = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,31}=+")


@dataclass(frozen=True, slots=True)
class APIClient:
    """The client of a request."""

    key: str  # the name of its API key; "" where there are none
    owner: str  # whose answers and jobs it may see: a digest of the key itself


KEYLESS = APIClient("", "")
"""The client of a server without keys."""


class Keyring:
    """The keys of a server; may be read again while it runs."""

    def __init__(self, entries: Sequence[str], file: str | None = None) -> None:
        """Read the keys.

        Args:
            entries: keys, with their names or without.
            file: of more of them, one a line, in UTF-8; empty lines and those that begin with #
                are skipped.

        Raises:
            SettingRejected: the file cannot be read, a key cannot be sent, two keys have one name,
                or one key has two.
        """
        self._entries, self._file = entries, file
        self._keys: dict[str, bytes] = {}
        self.read()

    def read(self) -> int:
        """Read the file again, and return the number of keys. On an error the old ones stay."""
        entries = [(f"api_key, entry {n}", entry) for n, entry in enumerate(self._entries, start=1)]
        self._keys = parse_keys([_checked(*entry) for entry in [*entries, *_lines(self._file)]])
        return len(self._keys)

    @property
    def names(self) -> list[str]:
        return list(self._keys)

    def client_of(self, token: bytes) -> APIClient:
        """The client of a token; without keys, one without a name.

        Name and owner are of one reading of the file: looking one up by the other later could
        give another client's, if the keys were read again meanwhile.

        Raises:
            InvalidAPIKey: the token is none of them.
        """
        keys = self._keys
        if not keys and self._file is None:
            return KEYLESS
        # every key is compared, so that the time taken says nothing about them
        names = [name for name, key in keys.items() if hmac.compare_digest(token, key)]
        if not token or not names:
            raise InvalidAPIKey("the API key is missing or wrong: send 'authorization: Bearer KEY'")
        return APIClient(names[0], owner_of(token))

    def knows(self, owner: str) -> bool:
        """Return whether an owner's key is still one of these."""
        if not self._keys and self._file is None:
            return owner == ""
        return any(owner_of(key) == owner for key in self._keys.values())


def owner_of(key: bytes) -> str:
    """The name of the client with this key in jobs and cached answers."""
    return hashlib.sha256(key).hexdigest()[:16]


def parse_keys(entries: Iterable[str]) -> dict[str, bytes]:
    """Keys by their names. The same entry twice is one key; else neither name nor key may come
    twice, or it would be unclear whose limits and share count: SettingRejected."""
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
    """The keys of a file, each with its place."""
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
    """A valid entry. Errors never show it: it is a secret."""
    entry = entry.strip()
    if " " in entry or not entry.isprintable():
        rule = "write KEY or NAME=KEY, one a line, and comments on lines of their own"
        raise SettingRejected(f"{where}: a key has no spaces or control characters: {rule}")
    if _NAME_ALONE.fullmatch(entry) and len(entry) % 4:  # else it may be base64
        raise SettingRejected(f"{where}: there is no key behind the name: write NAME=KEY")
    return entry
