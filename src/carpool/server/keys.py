"""API keys: who a client is by the token that it sends.

A key is written `KEY` or `NAME=KEY`; one without a name is called after its place, `key-1`. Names
stand in logs, metrics of tenants and limits; the keys themselves never do.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from carpool.errors import InvalidAPIKey, SettingRejected

_NAMED = re.compile(r"([A-Za-z][A-Za-z0-9._-]{0,31})=(.*[^=].*)")  # no padding of base64


class Keyring:
    """The keys of a server; may be read again while it runs."""

    def __init__(self, entries: Sequence[str], file: str | None = None) -> None:
        """Read the keys.

        Args:
            entries: keys, with their names or without.
            file: of more of them, one a line; empty lines and those that begin with # are none.

        Raises:
            SettingRejected: the file cannot be read, or two keys have one name.
        """
        self._entries, self._file = entries, file
        self._keys: dict[str, bytes] = {}
        self.read()

    def read(self) -> int:
        """Read the file again; gives how many keys there are. On an error the old ones stay.

        Raises:
            SettingRejected: as the constructor.
        """
        self._keys = parse([*self._entries, *_lines(self._file)])
        return len(self._keys)

    def name_of(self, token: bytes) -> str:
        """The name of a key; nothing where none is needed.

        Raises:
            InvalidAPIKey: the token is none of them.
        """
        if not self._keys and self._file is None:
            return ""
        # every key is compared, so that the time taken says nothing about them
        known = [name for name, key in self._keys.items() if hmac.compare_digest(token, key)]
        if not token or not known:
            raise InvalidAPIKey("the API key is missing or wrong: send 'authorization: Bearer KEY'")
        return known[0]

    def owner(self, name: str) -> str:
        """Whose jobs a client sees: its key's, whatever the key is called by now."""
        key = self._keys.get(name, b"")
        return hashlib.sha256(key).hexdigest()[:16] if key else ""


def parse(entries: Iterable[str]) -> dict[str, bytes]:
    """Keys by their names.

    Raises:
        SettingRejected: two have the same name.
    """
    keys: dict[str, bytes] = {}
    for place, entry in enumerate(entries, start=1):
        match = _NAMED.fullmatch(entry)
        name, key = (match[1], match[2]) if match else (f"key-{place}", entry)
        if name in keys:
            raise SettingRejected(f"api_key: two keys are called {name!r}: give each its own name")
        keys[name] = key.encode()
    return keys


def _lines(file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = Path(file).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingRejected(f"api_key_file={file!r} cannot be read: {error}") from error
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
