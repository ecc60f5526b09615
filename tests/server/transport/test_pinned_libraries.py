"""What `StrictHTTPProtocol` builds on in uvicorn: a change there is named here before it breaks."""

import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import httpx2
import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from carpool.config import ServeSettings
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.server.access.keys import Keyring
from carpool.server.draining import DrainingServer
from carpool.server.transport import http_protocol
from carpool.server.transport.http_protocol import StrictHTTPProtocol
from carpool.telemetry.tracing import Tracing
from support.app import CARD, Grey, fleet_of

ROOT = Path(__file__).parents[3]
CALLED = {  # what uvicorn calls, and so must go on calling, by where it stands
    "on_headers_complete": ("RequestResponseCycle(", "self.on_response_complete"),
    "on_response_complete": ("self.flow.resume_reading", "self.timeout_keep_alive_task"),
    "on_message_complete": ("self.cycle.more_body = False", "self.cycle.message_event.set"),
    "on_body": ("self.flow.pause_reading", "HIGH_WATER_LIMIT"),
}


def used(object_: str) -> Iterator[str]:
    """The names behind `object_.` in the source of our protocol."""
    source = inspect.getsource(http_protocol)
    yield from sorted(set(re.findall(rf"\b{re.escape(object_)}\.([a-z_0-9]+)", source)))


def test_pyproject_admits_only_the_minor_version_that_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [wanted] = [one for one in project["dependencies"] if one.startswith("uvicorn")]

    major, minor, *_ = version("uvicorn").split(".")
    assert wanted.endswith(f">={major}.{minor},<{major}.{int(minor) + 1}"), (
        f"uvicorn {version('uvicorn')} is installed, pyproject.toml says {wanted}: compare its "
        "httptools_impl.py with server/transport/http_protocol.py, then pin the new minor version"
    )


def test_idle_connections_outlast_those_of_clients() -> None:
    """A request that meets a connection being closed is lost, and a POST is not retried."""
    worker = Grey()
    store = JobStore(None, ttl_s=1000, max_bytes=1 << 20, max_waiting=1)
    runner = Runner(store, worker, {}, model=lambda: CARD.id, max_running=1)
    server = DrainingServer(fleet_of(worker), ServeSettings(port=0), runner, Keyring(()), Tracing())
    store.close()

    longest_s = max(httpx2.Limits().keepalive_expiry or 0, 15)  # aiohttp's
    assert server.config.timeout_keep_alive > longest_s


def test_the_protocol_overrides_and_calls_nothing_private_of_uvicorns() -> None:
    own = set(vars(StrictHTTPProtocol)) - set(vars(object))
    theirs = {name for name in vars(HttpToolsProtocol) if re.match(r"_[a-z]", name)}
    private = {name for name in inspect.getsource(http_protocol).split("self.") if name[:1] == "_"}

    assert not own & theirs
    assert not {re.match(r"\w+", name)[0] for name in private} & theirs  # type: ignore[index]


@pytest.mark.parametrize(
    "method", sorted(set(vars(StrictHTTPProtocol)) & set(vars(HttpToolsProtocol)))
)
def test_what_the_protocol_overrides_takes_the_same_arguments(method: str) -> None:
    ours, theirs = getattr(StrictHTTPProtocol, method), getattr(HttpToolsProtocol, method)

    if inspect.isfunction(ours):
        assert list(inspect.signature(ours).parameters) == list(
            inspect.signature(theirs).parameters
        ), f"uvicorn's HttpToolsProtocol.{method} has other arguments by now"


@pytest.mark.parametrize("method", CALLED)
def test_uvicorn_still_calls_what_the_protocol_overrides(method: str) -> None:
    source = inspect.getsource(getattr(HttpToolsProtocol, method))

    for call in CALLED[method]:
        assert call in source, f"uvicorn's HttpToolsProtocol.{method} has no {call} any more"


@pytest.mark.parametrize(
    ("place", "kind"),
    [("self", HttpToolsProtocol), ("self.cycle", RequestResponseCycle), ("self.flow", FlowControl)],
)
def test_the_attributes_that_the_protocol_reads_are_set(place: str, kind: type) -> None:
    assigned = re.findall(r"self\.(\w+)(?:: .+)? =", inspect.getsource(kind))
    own = set(dir(StrictHTTPProtocol if kind is HttpToolsProtocol else kind))

    assert set(used(place)) <= own | set(assigned), f"uvicorn's {kind.__name__} lacks some of them"
