"""JSON files that an engine keeps between its runs.

They are written atomically. An unreadable object in their place (a torn file, another file, a
folder) is renamed, so that it can be inspected and the next run starts with a new file: no such
file ends an engine.
"""

import contextlib
import json
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any

from carpool import jsonfile
from carpool.errors import named

log = logging.getLogger("carpool")

SUFFIX = ".damaged"  # added to a damaged file's name; only the last one is kept


def read(path: Path) -> bytes:
    """The content of a file.

    Raises:
        OSError: it does not exist, or cannot be read.
        ValueError: it is too large for such a file, or not a regular file.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a pipe would block
        raise ValueError("it is no file")
    return jsonfile.read(path)


def write(path: Path, data: Any) -> None:
    """Replace a file atomically; log errors."""
    # two engines of one process may share the file
    draft = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
        os.replace(draft, path)
    except (OSError, ValueError) as error:
        log.warning("%s cannot be written, and its content is lost: %s", path, error)
        with contextlib.suppress(OSError):
            draft.unlink()


def set_aside(path: Path, why: BaseException) -> None:
    """Rename an unreadable file, and log the reason."""
    place = path.with_name(path.name + SUFFIX)
    try:
        os.replace(path, place)
    except OSError as error:
        log.warning("%s cannot be read (%s), nor renamed: %s", path, named(why), named(error))
    else:
        message = "%s cannot be read, and starts empty (it was renamed to %s): %s"
        log.warning(message, path, place.name, named(why))
