"""A web server on loopback that keeps what it is sent: a receiver of webhooks, an object store."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest


class Site(ThreadingHTTPServer):
    """The first requests are answered with a status of their own, without being heeded."""

    def __init__(self, *statuses: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses, self.got = list(statuses), list[tuple[str, dict[str, str], bytes]]()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def answer(self, method: str, path: str, content: bytes) -> bytes:
        return b""


class Handler(BaseHTTPRequestHandler):
    server: Site

    def do_POST(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        content = self.rfile.read(int(headers.get("content-length", 0)))
        self.server.got.append((self.path, headers, content))
        is_refusable = self.server.statuses and self.command != "DELETE"
        status = self.server.statuses.pop(0) if is_refusable else 200
        answer = self.server.answer(self.command, self.path, content) if status == 200 else b""
        self.send_response(status)
        for name, value in (("location", "/"), ("etag", '"1"'), ("content-length", len(answer))):
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(answer)

    do_PUT = do_DELETE = do_POST

    def log_message(self, *_: Any) -> None:
        pass


class Store(Site):
    """Keeps objects, whole or in parts, as S3, Google and Azure do."""

    def __init__(self, *statuses: int) -> None:
        super().__init__(*statuses)
        self.parts, self.objects = dict[str, bytes](), dict[str, bytes]()

    def answer(self, method: str, path: str, content: bytes) -> bytes:
        url = urlsplit(path)
        query, name = parse_qs(url.query, keep_blank_values=True), unquote(url.path)
        if method == "DELETE":
            self.parts.clear()
            self.statuses = [404] * 9  # parts that arrive later belong to no upload
        elif part := query.get("partNumber") or query.get("blockid"):
            self.parts[part[0]] = content
        elif "uploads" in query:
            return b"<Begun><UploadId>7</UploadId></Begun>"
        elif "uploadId" in query or query.get("comp") == ["blocklist"]:
            order = re.findall(rb"<(?:PartNumber|Uncommitted)>([^<]+)<", content)
            self.objects[name] = b"".join(self.parts[number.decode()] for number in order)
            return b'<Ended><ETag>"1"</ETag></Ended>'
        else:
            self.objects[name] = content
        return b""


@contextmanager
def listening(server: Any) -> Iterator[Any]:
    """Run a `Site` on a thread."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def name_in_environment(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all three services be one server."""
    names = ("client_email", "private_key", "private_key_id")
    account = {"gcs_base_url": url, "disable_oauth": True, **dict.fromkeys(names, "")}
    (folder / "account.json").write_text(json.dumps(account))
    for name, value in {
        "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "x",
        "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret",
        "GOOGLE_SERVICE_ACCOUNT": str(folder / "account.json"),
        "AZURE_STORAGE_ENDPOINT": url, "AZURE_ALLOW_HTTP": "true",
        "AZURE_STORAGE_ACCOUNT_NAME": "me", "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
