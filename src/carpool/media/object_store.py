"""Copies files to an object store: S3 and compatible stores, Google's, Azure's."""

from collections.abc import Sequence
from datetime import timedelta
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from carpool.errors import SettingRejected

_RETRIES = {"max_retries": 2, "retry_timeout": timedelta(seconds=30)}  # the outbox tries again


class ObjectStore:
    """A folder of a bucket, with credentials from the environment; SettingRejected: invalid URL.

    It connects at the first copy.
    """

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.store import from_url

            if not url.startswith(("s3://", "gs://", "az://")):
                raise ValueError("must begin with s3://, gs:// or az://")
            self._put, self._url = obstore.put, url.rstrip("/")
            self._store: Any = from_url(url, retry_config=_RETRIES)
        except Exception as error:  # the library raises any class
            reason = str(error).partition("\n")[0][:200]
            if isinstance(error, ImportError):
                reason = "it needs the library obstore: pip install obstore"
            raise SettingRejected(f"upload={url!r}: {reason}", param="upload") from error

    def copy(self, folder: str, paths: Sequence[Path]) -> list[str]:
        """Copy files, replacing old copies; returns their URLs. Blocks; raises library errors."""
        for path in paths:
            kind = {"Content-Type": guess_type(path.name)[0] or "application/octet-stream"}
            self._put(self._store, f"{folder}/{path.name}", path, attributes=kind)
        return [f"{self._url}/{folder}/{path.name}" for path in paths]
