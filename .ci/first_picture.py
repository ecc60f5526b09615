"""Time `make serve` on a fresh machine by part, up to the first picture.

usage: make first-picture     (tests the committed state; leaves no files)

It uses a clone, an empty home folder, and only the shell's variables about package sources. The
command that the server prints draws the picture.
"""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KEPT = re.compile(r"PATH|LANG|(PIP|UV|SSL)_.*|REQUESTS_CA_BUNDLE|.*_proxy")
PATIENCE_S = 60
ROOT = Path(__file__).parents[1]


def main(room: Path) -> None:
    begun = time.monotonic()
    clone, home = room / "clone", room / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    parts = {"clone": time.monotonic() - begun}
    environ = {name: text for name, text in os.environ.items() if KEPT.fullmatch(name)}
    server = subprocess.Popen(
        ["make", "serve", f"PORT={free_port()}"],
        cwd=clone, env={**environ, "HOME": str(home)}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        parts |= until_drawn(server, clone)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(PATIENCE_S)
    parts["all but the clone"] = sum(parts.values()) - parts["clone"]
    for part, seconds in parts.items():
        print(f"{part:<20} {seconds:5.1f} s")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{'of the processor':<20} {used.ru_utime + used.ru_stime:5.1f} s")


def until_drawn(server: "subprocess.Popen[str]", clone: Path) -> dict[str, float]:
    """Read the output of `make serve`, run its command, and return the seconds of each part."""
    parts: dict[str, float] = {}
    installed = begun = time.monotonic()
    command = ""
    assert server.stdout is not None
    for line in server.stdout:
        print(f"  {line.rstrip()}", file=sys.stderr)
        if part := re.fullmatch(r"(environment|uv|libraries): ([\d.]+) s\n", line):
            parts[part[1]] = float(part[2])
            installed = time.monotonic()
        elif line.startswith("Loading"):
            parts["imports"] = time.monotonic() - installed
        elif line.startswith("Serving"):
            parts["model"] = time.monotonic() - installed - parts.get("imports", 0)
        elif line.startswith("curl") or command:
            command += line
            if not line.rstrip().endswith("\\"):
                break
    else:
        raise SystemExit("make serve ended without the command that draws")
    began_s = time.monotonic()
    subprocess.run(["sh", "-c", command], cwd=clone, check=True)
    assert (clone / "out.png").read_bytes().startswith(b"\x89PNG"), command
    parts["picture"] = time.monotonic() - began_s
    parts["make, between parts"] = time.monotonic() - begun - sum(parts.values())
    return parts


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
