"""The file of a Unix socket: whose it is, and who may replace it."""

import errno
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from carpool.server.transport.listening import UnixSocket


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "carpool.sock"


def dead(path: Path) -> None:
    """What a server leaves that was killed."""
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))
        one.listen()


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def test_everybody_may_connect_until_it_is_removed(path: Path) -> None:
    unix = UnixSocket(path)
    with closing(unix.socket):
        assert connects(path)
        assert path.stat().st_mode & 0o777 == 0o666
        unix.remove()
        unix.remove()  # somebody else may have done it

    assert not path.exists()


def test_a_dead_servers_socket_is_replaced_and_its_permissions_stay(path: Path) -> None:
    dead(path)
    path.chmod(0o660)
    assert not connects(path)

    with closing(UnixSocket(path).socket):
        assert connects(path)
        assert path.stat().st_mode & 0o777 == 0o660


def test_a_living_servers_socket_is_not_taken(path: Path) -> None:
    with closing(UnixSocket(path).socket):
        with pytest.raises(OSError, match="a server listens there") as told:
            UnixSocket(path)

        assert told.value.errno == errno.EADDRINUSE
        assert connects(path)


def test_a_living_server_with_a_full_queue_is_alive(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as busy:
        busy.bind(str(path))
        busy.listen(0)
        with closing(socket.socket(socket.AF_UNIX)) as client:
            client.connect(str(path))

            with pytest.raises(OSError, match="a server listens there"):
                UnixSocket(path)


def test_what_is_no_socket_stays(path: Path) -> None:
    path.write_text("precious")

    with pytest.raises(FileExistsError, match="a file that is no socket"):
        UnixSocket(path)

    assert path.read_text() == "precious"


def test_a_successors_socket_is_not_removed(path: Path) -> None:
    first = UnixSocket(path)
    path.unlink()  # an administrator's, so that a successor may start beside it
    with closing(first.socket), closing(UnixSocket(path).socket):
        first.remove()

        assert connects(path)


def test_of_many_that_find_a_dead_socket_at_once_one_gets_it(path: Path) -> None:
    def start(_: int) -> UnixSocket | None:
        try:
            return UnixSocket(path)
        except OSError:
            return None

    for _ in range(10):
        dead(path)
        with ThreadPoolExecutor(8) as pool:
            [unix] = [one for one in pool.map(start, range(8)) if one is not None]
        with closing(unix.socket):
            assert connects(path)
            unix.remove()
