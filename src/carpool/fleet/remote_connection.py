"""The front's end of a connection to a worker on another machine.

The messages are those of a local socket. A worker that is silent for `SILENT_S` counts as lost, and
its requests continue elsewhere. It may still be alive, and is used again when it answers.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from carpool.errors import StoreFailed, reason
from carpool.fleet import handshake
from carpool.fleet.packets import SILENT_S, Malformed, PacketStream
from carpool.worker import encoding, protocol
from carpool.worker.connection import mapped

log = logging.getLogger("carpool")


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """The address of a worker, with the secret and certificate that a connection needs."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    certificate: str = ""  # PEM of the worker's end; empty: no TLS
    node: str = ""  # Ray's name of its node


def client_tls(certificate: str) -> ssl.SSLContext:
    """TLS to an end with exactly this certificate, or with one that it signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # certificate and secret identify workers, not host names
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate)
    return context


class RemoteConnection:
    """A connection to a remote worker. `messages` ends when it ends, for any reason."""

    def __init__(self, stream: PacketStream, where: str) -> None:
        self._stream, self._where, self._is_killed = stream, where, False
        self._problem = ""

    @classmethod
    async def open(cls, address: WorkerAddress, spool: Path | None = None) -> "RemoteConnection":
        """Connect, with mutual authentication by the secret.

        Args:
            spool: folder for outputs that are too large for a message.

        Raises:
            OSError: the worker does not exist, or does not answer in time.
        """
        where = f"{address.host}:{address.port}"
        tls = client_tls(address.certificate) if address.certificate else None
        writer = None
        try:
            async with asyncio.timeout(handshake.CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, ssl=tls, server_hostname="carpool" if tls else None
                )
                await handshake.introduce(reader, writer, address.secret)
        except BaseException as error:
            if writer is not None:
                writer.close()
            if isinstance(error, TimeoutError):
                problem = f"did not answer in {handshake.CONNECT_S:g} s"
                raise ConnectionError(f"{where} {problem}") from None
            if isinstance(error, (handshake.Refused, asyncio.IncompleteReadError)):
                raise ConnectionError(f"{where}: {error}") from error
            raise
        return cls(PacketStream(reader, writer, silent_s=SILENT_S, spool=spool), where)

    def send(self, message: protocol.ToWorker) -> None:
        """Queue a message; messages arrive in order."""
        self._stream.put(encoding.encode_body(message))

    async def messages(self) -> AsyncIterator[protocol.ToFront]:
        """Yield the worker's messages until it, or the connection, ends."""
        try:
            async for body in self._stream.bodies():
                if body is None:
                    raise Malformed("a worker cannot kill its front")
                yield self._taken(encoding.decode_to_front(body))
        except (Malformed, encoding.Undecodable) as error:
            self._problem = f"it broke the protocol: {error}"

    def _taken(self, message: protocol.ToFront) -> protocol.ToFront:
        """Attach to a message the file that was sent before it."""
        if not isinstance(message, protocol.Done) or message.clip is None or not message.clip.path:
            return message
        try:
            message.clip.path = os.fsencode(self._stream.take_file())
        except OSError as error:
            log.error("an output could not be kept: %s", error)
            problem = f"the output could not be kept: {reason(error)}"
            return protocol.RequestFailed(message.request_id, StoreFailed.__name__, problem)
        return mapped(message)

    def kill(self) -> None:
        self._is_killed = True
        self._stream.kill()

    @property
    def is_lost(self) -> bool:
        """Whether only the connection is known to have ended: the worker may be alive."""
        is_known = bool(self._stream.farewell) or self._is_killed
        return self._stream.is_refused or not is_known

    @property
    def is_explained(self) -> bool:
        """Whether a cause outside of the worker ended it, such as the loss of its node."""
        return self.is_lost

    @property
    def end(self) -> str:
        """The reason for its end, for the log."""
        if self._stream.farewell or self._problem:
            return self._stream.farewell or self._problem
        if self._stream.is_silent:
            return f"{self._where} was silent for {SILENT_S:g} s"
        return f"the connection to {self._where} was lost"

    async def close(self) -> None:
        """Close the connection; the worker keeps its model for the next one."""
        self._stream.close()
