"""The front's end of a connection to a worker on another machine.

The messages are those of a local socket. A worker that is silent for `SILENT_S` is lost, and its
requests go on elsewhere. It may be well, and is used again when it answers.
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
from carpool.worker import protocol
from carpool.worker.connection import mapped

log = logging.getLogger("carpool")


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """The address of a worker, with the secret and certificate that a connection needs."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    certificate: str = ""  # PEM, of the worker's end; empty: no TLS
    node: str = ""  # on which it runs, by Ray's name


def client_tls(certificate: str) -> ssl.SSLContext:
    """TLS to an end that has this very certificate, or one that it signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # workers are known by certificate and secret, not by name
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate)
    return context


class RemoteConnection:
    """A worker elsewhere. However it ends, `messages` ends with it."""

    def __init__(self, stream: PacketStream, where: str) -> None:
        self._stream, self._where, self._is_killed = stream, where, False
        self._problem = ""

    @classmethod
    async def open(cls, address: WorkerAddress, spool: Path | None = None) -> "RemoteConnection":
        """Connect, and prove to each other that both know the secret.

        Args:
            spool: folder for outputs that are too large for a message.

        Raises:
            OSError: there is no such worker, or it does not answer in time.
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
                raise ConnectionError(
                    f"{where} did not answer in {handshake.CONNECT_S:g} s"
                ) from None
            if isinstance(error, (handshake.Refused, asyncio.IncompleteReadError)):
                raise ConnectionError(f"{where}: {error}") from error
            raise
        return cls(PacketStream(reader, writer, silent_s=SILENT_S, spool=spool), where)

    def send(self, message: protocol.ToWorker) -> None:
        """Queue a message; they arrive in order."""
        self._stream.put(protocol.encode_body(message))

    async def messages(self) -> AsyncIterator[protocol.ToFront]:
        """Yield the worker's messages until it, or the connection, ends."""
        try:
            async for body in self._stream.bodies():
                if body is None:
                    raise Malformed("a worker cannot kill its front")
                yield self._taken(protocol.decode_to_front(body))
        except (Malformed, protocol.Undecodable) as error:
            self._problem = f"it broke the protocol: {error}"

    def _taken(self, message: protocol.ToFront) -> protocol.ToFront:
        """The message, with the file that was sent before it."""
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
        """Whether only the connection ended, as far as is known: the worker may be well."""
        is_known = bool(self._stream.farewell) or self._is_killed
        return self._stream.is_refused or not is_known

    @property
    def is_explained(self) -> bool:
        """Whether it ended by a cause outside of the worker, such as the end of its node."""
        return self.is_lost

    @property
    def end(self) -> str:
        """How it ended, for the log."""
        if self._stream.farewell or self._problem:
            return self._stream.farewell or self._problem
        if self._stream.is_silent:
            return f"{self._where} was silent for {SILENT_S:g} s"
        return f"the connection to {self._where} was lost"

    async def close(self) -> None:
        """Close the connection; the worker keeps its model for the next one."""
        self._stream.close()
