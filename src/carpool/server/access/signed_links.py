"""Signed links to stored pictures, for an hour, and to files of jobs.

A signed link needs no API key, expires at the time in it, and can name only files that were stored
here. The secret lies in the same folder: links survive a restart if the files do.
"""

import hashlib
import hmac
import os
import re
import secrets
import threading
from collections import OrderedDict
from pathlib import Path

from carpool.errors import FileNotFound, StoreFailed, reason
from carpool.jobs.clock import StoreClock
from carpool.types import Clock

TTL_S = 3600
MOST_BYTES = 1 << 30  # limit for all files; the oldest are evicted first

_NO_FILE = "this link has no file: links end after an hour"
_NAME = re.compile(r"file-[0-9a-f]{24}\.(png|jpeg|webp)")
_PART = re.compile(rf"({_NAME.pattern}|secret)\.part")


class SignedFiles:
    """Files with signed links. Thread-safe; may block on the disk."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: Clock | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Open a folder without other files.

        Args:
            clock: Unix seconds that do not jump, as `StoreClock` gives them.

        Raises:
            StoreFailed: the folder cannot be used.
        """
        self._clock, self._most_bytes = clock or StoreClock(), most_bytes
        self._folder = folder
        self._sizes: OrderedDict[str, int] = OrderedDict()  # bytes by name, the oldest first
        self._changing = threading.Lock()
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            for path in folder.iterdir():  # remains of a killed server
                if _PART.fullmatch(path.name):
                    path.unlink()
            self._secret = _secret(folder / "secret")
            now_s = self._clock()
            paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
            for path in sorted(paths, key=lambda path: path.stat().st_mtime):
                self._sizes[path.name] = path.stat().st_size
                if path.stat().st_mtime > now_s:  # the wall clock was changed: count it as new
                    os.utime(path, (now_s, now_s))
        except OSError as error:
            raise StoreFailed(f"{folder} cannot hold pictures: {error}") from error

    def keep(self, content: bytes, kind: str) -> str:
        """Store a picture of a format, such as png; returns the path of its link.

        Raises:
            StoreFailed: the disk refuses the file.
        """
        name, expires_s = f"file-{secrets.token_hex(12)}.{kind}", int(self._clock()) + TTL_S
        part = self._folder / f"{name}.part"
        try:
            part.write_bytes(content)
            os.utime(part, (expires_s - TTL_S,) * 2)  # `_tidy` reads the age from it
            part.rename(self._folder / name)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise StoreFailed(f"the picture could not be stored: {reason(error)}") from error
        with self._changing:
            self._sizes[name] = len(content)
            self._tidy()
        return self._link(name, expires_s)

    def link(self, job_id: str, name: str) -> str:
        """The path of a link to a job's file, for an hour from now."""
        return self._link(f"{job_id}/{name}", int(self._clock()) + TTL_S)

    def check(self, name: str, expires: str, signature: str) -> None:
        """Check a signature.

        Raises:
            FileNotFound: the link is not one of ours, or has expired.
        """
        if re.fullmatch(r"[0-9]{1,12}", expires) and int(expires) > self._clock():
            right = self._signature(name, int(expires))
            if hmac.compare_digest(signature.encode(), right.encode()):
                return
        raise FileNotFound(_NO_FILE)

    def get(self, name: str, expires: str, signature: str) -> Path:
        """The path of the file behind a link.

        Raises:
            FileNotFound: the link is not one of ours, or has expired, or the file was removed.
        """
        self.check(name, expires, signature)
        path = self._folder / name
        if not path.is_file() or self._is_old(path):
            raise FileNotFound(_NO_FILE)
        return path

    def __len__(self) -> int:
        return len(self._sizes)

    def _tidy(self) -> None:
        total = sum(self._sizes.values())
        for name, size in list(self._sizes.items()):
            path = self._folder / name
            if total <= self._most_bytes and not (path.is_file() and self._is_old(path)):
                return
            path.unlink(missing_ok=True)
            total -= self._sizes.pop(name, size)

    def _is_old(self, path: Path) -> bool:
        return path.stat().st_mtime + TTL_S <= self._clock()

    def _link(self, name: str, expires_s: int) -> str:
        return f"/v1/files/{name}?expires={expires_s}&signature={self._signature(name, expires_s)}"

    def _signature(self, name: str, expires_s: int) -> str:
        return hmac.new(self._secret, f"{name} {expires_s}".encode(), hashlib.sha256).hexdigest()


def _secret(path: Path) -> bytes:
    if not path.is_file() or path.stat().st_size != 32:
        part = path.with_suffix(".part")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        part.rename(path)
    return path.read_bytes()
