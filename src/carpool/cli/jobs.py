"""`carpool jobs`: the jobs of a running server, over HTTP."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from carpool.errors import CarpoolError, Overloaded

if TYPE_CHECKING:
    import httpx2

JOBS_PER_PAGE = 100  # the server's limit for a page
URL = "http://127.0.0.1:8000"
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_MOMENTS = ("created_at", "started_at", "completed_at", "expires_at")
_FOLDER = click.Path(file_okay=False, path_type=Path)
_ID = click.argument("job_id", metavar="ID")


def events(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parse lines of text into server-sent events."""
    kind = ""
    for line in lines:
        if line.startswith("event:"):
            kind = line.removeprefix("event:").strip()
        elif line.startswith("data:"):
            yield kind, json.loads(line.removeprefix("data:"))


class NoAnswer(CarpoolError):
    """The server cannot be reached, or the connection broke."""


class ServerClient:
    """HTTP client of a server: its jobs, models and events.

    Raises:
        click.UsageError: `url` is not a server's URL.
        CarpoolError: from all methods: there is no answer, or it is an error.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        import httpx2  # slow import, not needed for `--help`

        try:
            base = httpx2.URL(url.rstrip("/").removesuffix("/v1") + "/")
        except httpx2.InvalidURL:
            base = httpx2.URL()
        if base.scheme not in ("http", "https") or not base.host:
            raise click.UsageError(f"--url {url}: write http://HOST:PORT")
        self._url, self._failures = url, httpx2.HTTPError
        self._http = httpx2.Client(
            base_url=base,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=30,
            trust_env=base.host not in _LOOPBACK,  # proxy settings
        )

    def close(self) -> None:
        self._http.close()

    def ask(self, method: str, *path: str, **query: Any) -> dict[str, Any]:
        """Send a request to a path under `/v1/jobs`; returns the JSON object of the answer."""
        return self.ask_at(method, _path(path), params=query)

    def ask_at(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        """Send a request to any path of the server."""
        with self._reachable():
            return self._checked(self._http.request(method, path, **request))

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the server's events live, until the connection ends."""
        with self._stream("v1/events", timeout=60) as answer:
            yield from events(answer.iter_lines())

    def content(self, job_id: str, name: str) -> bytes:
        """A file of a job."""
        with self._stream(_path((job_id, "files", name))) as answer:
            return bytes(answer.read())

    def served(self) -> dict[str, Any]:
        """The models of the server, and its workers if there are several."""
        with self._reachable():
            models = self._checked(self._http.get("v1/models"))["data"]
            health = self._http.get("health")
        is_ready = health.status_code != 503  # not an error here
        workers = (self._checked(health) if is_ready else health.json()).get("workers", [])
        return {"models": models, "workers": workers}

    def fetch(self, job_id: str, name: str, to: Path) -> None:
        """Download a file of a job; a partial file is removed."""
        part = to.with_name(f"{to.name}.part")
        path = _path((job_id, "files", name))
        try:
            with self._stream(path) as answer, part.open("wb") as file:
                file.writelines(answer.iter_bytes())
            part.replace(to)
        finally:
            part.unlink(missing_ok=True)

    @contextmanager
    def _stream(self, path: str, **options: Any) -> "Iterator[httpx2.Response]":
        """A successful answer whose body is not read yet."""
        with self._reachable(), self._http.stream("GET", path, **options) as answer:
            if not answer.is_success:
                answer.read()
                self._checked(answer)
            yield answer

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except self._failures as error:
            message = f"no answer from {self._url}: {error}"
            raise NoAnswer(f"{message}; is `carpool serve` running there?") from None

    def _checked(self, answer: "httpx2.Response") -> dict[str, Any]:
        body = None
        with suppress(ValueError):
            body = answer.json()
        match body:
            case dict() if answer.is_success:
                return body
            case {"error": {"code": "invalid_api_key"}}:
                rule = "give it as --api-key, or in CARPOOL_API_KEY"
                raise CarpoolError(f"{self._url}: the API key is missing or wrong: {rule}")
            case {"error": {"message": message}} if answer.status_code == 429:
                raise Overloaded(str(message))
            case {"error": {"message": message}}:
                raise CarpoolError(str(message))
        raise CarpoolError(f"{self._url} answers {answer.status_code}, not as `carpool serve` does")


def _path(parts: tuple[str, ...]) -> str:
    return "/".join(("v1/jobs", *(quote(part, safe="") for part in parts)))


def connection_options(command: Callable[..., None]) -> Callable[..., None]:
    key = click.option("--api-key", envvar="CARPOOL_API_KEY", help="bearer token to send")
    url = click.option("--url", default=URL, show_default=True, help="of the server")
    return url(key(command))


def _with_client(command: Callable[..., Iterator[str]]) -> Callable[..., None]:
    """Decorator that adds the connection flags, passes the client, and prints yielded lines."""

    @connection_options
    @click.option("--json", "as_json", is_flag=True, help="print JSON, one object per line")
    @wraps(command)
    def run(url: str, api_key: str | None, **options: Any) -> None:
        with closing(ServerClient(url, api_key)) as server:
            for line in command(server, **options):
                click.echo(line)

    return run


@click.group()
def jobs() -> None:
    """Show, cancel, delete and download the jobs of a running server.

    CARPOOL_API_KEY replaces --api-key. A key sees only its own jobs.
    """


@jobs.command("list")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="of jobs")
@_with_client
def list_(server: ServerClient, limit: int, as_json: bool) -> Iterator[str]:
    """List the newest jobs: id, state, progress, time of acceptance, model."""
    query: dict[str, Any] = {}
    while limit > 0:
        page = server.ask("GET", limit=min(limit, JOBS_PER_PAGE), **query)
        for job in page["data"]:
            yield json.dumps(job) if as_json else _line(job)
        limit -= len(page["data"])
        if not page["has_more"]:
            return
        query = {"after": page["last_id"]}


@jobs.command()
@_ID
@_with_client
def show(server: ServerClient, job_id: str, as_json: bool) -> Iterator[str]:
    """Show all fields of a job."""
    job = server.ask("GET", job_id)
    yield json.dumps(job) if as_json else _all(job)


@jobs.command()
@_ID
@_with_client
def cancel(server: ServerClient, job_id: str, as_json: bool) -> Iterator[str]:
    """Cancel a job before its next step; no effect on an ended job."""
    job = server.ask("POST", job_id, "cancel")
    yield json.dumps(job) if as_json else _line(job)


@jobs.command()
@_ID
@_with_client
def remove(server: ServerClient, job_id: str, as_json: bool) -> Iterator[str]:
    """Delete a job and its files; a running job stops before its next step."""
    removal = server.ask("DELETE", job_id)
    yield json.dumps(removal) if as_json else removal["id"]


@jobs.command()
@_ID
@click.option("-o", "--output", default=".", type=_FOLDER, help="folder for the files ID-NAME")
@_with_client
def fetch(server: ServerClient, job_id: str, output: Path, as_json: bool) -> Iterator[str]:
    """Download the files of a completed job into a folder, and print their paths."""
    job = server.ask("GET", job_id)
    if job["status"] != "completed":
        raise CarpoolError(f"job {job_id} has no files: it is {_state(job)}")
    output.mkdir(parents=True, exist_ok=True)
    for file in job["files"]:
        path = output / Path(f"{job['id']}-{file['name']}").name
        server.fetch(job_id, file["name"], path)
        yield json.dumps({"path": str(path), **file}) if as_json else str(path)


def _line(job: dict[str, Any]) -> str:
    state, created = job["status"], _moment(job["created_at"])
    return f"{job['id']}  {state:11}  {job['progress']:3} %  {created}  {job['model']}"


def _state(job: dict[str, Any]) -> str:
    error = job["error"]
    return f"{job['status']}: {error['message']}" if error else str(job["status"])


def _all(job: dict[str, Any]) -> str:
    values = {name: value for name, value in job.items() if value not in (None, [])}
    values |= {name: _moment(job[name]) for name in _MOMENTS if job[name]}
    values |= {"status": _state(job), "files": ", ".join(file["name"] for file in job["files"])}
    visible = values.keys() - {"object", "error"}
    return "\n".join(f"{name:15} {values[name]}" for name in job if name in visible)


def _moment(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s).isoformat(" ")
