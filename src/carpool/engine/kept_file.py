"""Files of JSON that an engine keeps between its runs.

They are written whole, or not at all. What else is found in their place (a torn file, another
one, a folder) is renamed, so that it can be looked at and the next run begins with a file of its
own: no such file ends an engine.
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

SUFFIX = ".damaged"  # of what was set aside; the last one is kept


def read(path: Path) -> bytes:
    """The content of a file.

    Raises:
        OSError: it is not there, or cannot be read.
        ValueError: it is larger than such a file can be, or nothing that has a content.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a pipe would be waited for
        raise ValueError("it is no file")
    return jsonfile.read(path)


def write(path: Path, data: Any) -> None:
    """Write a file, so that it is either the old one or the new one. Logs what prevents that."""
    # two engines of one process may have the same file
    draft = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
        os.replace(draft, path)
    except (OSError, ValueError) as error:
        log.warning("%s is not written, and what it would have kept is lost: %s", path, error)
        with contextlib.suppress(OSError):
            draft.unlink()


def set_aside(path: Path, why: BaseException) -> None:
    """Rename what is in the place of a file, and say why it cannot be read."""
    place = path.with_name(path.name + SUFFIX)
    try:
        os.replace(path, place)
    except OSError as error:
        log.warning("%s cannot be read (%s), nor renamed: %s", path, named(why), named(error))
    else:
        message = "%s cannot be read, and begins anew (it was renamed to %s): %s"
        log.warning(message, path, place.name, named(why))
