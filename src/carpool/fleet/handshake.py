"""Mutual authentication: both ends of a connection prove that they know the fleet's secret.

The secret is never sent. The worker sends a nonce; the front answers with its own nonce and an HMAC
of both; the worker answers with another HMAC of both. A replay fails, because nonces are fresh and
the two ends send different HMACs. All parts have a fixed size: a foreign peer cannot make a worker
read more, and the caller sets a time limit.

Source: challenge and response as in RFC 2195 and ISO/IEC 9798-4 (three passes, mutual).
"""

import hashlib
import hmac
import secrets
from asyncio import StreamReader, StreamWriter

MAGIC = b"carpool-worker-1"  # a new number for a new protocol
NONCE_BYTES, PROOF_BYTES = 32, 32
CONNECT_S = 5.0  # limit for connecting and authenticating


class Refused(Exception):
    """The other end does not know the secret, or speaks another protocol."""


def new_secret() -> bytes:
    return secrets.token_bytes(PROOF_BYTES)


def proof(secret: bytes, role: bytes, of_worker: bytes, of_front: bytes) -> bytes:
    """The HMAC of two nonces, with the secret as its key."""
    return hmac.digest(secret, MAGIC + role + of_worker + of_front, hashlib.sha256)


async def welcome(reader: StreamReader, writer: StreamWriter, secret: bytes) -> None:
    """Authenticate a front, on the worker's end.

    Raises:
        Refused, OSError, IncompleteReadError: the peer is no front of this fleet.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    writer.write(MAGIC + nonce)
    answer = await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
    peer_nonce, proven = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proven, proof(secret, b"front", nonce, peer_nonce)):
        raise Refused("a connection was refused: the peer does not know the fleet's secret")
    writer.write(proof(secret, b"worker", nonce, peer_nonce))
    await writer.drain()


async def introduce(reader: StreamReader, writer: StreamWriter, secret: bytes) -> None:
    """Authenticate a worker, on the front's end.

    Raises:
        Refused, OSError, IncompleteReadError: the peer is no worker of this fleet.
    """
    greeting = await reader.readexactly(len(MAGIC) + NONCE_BYTES)
    if not greeting.startswith(MAGIC):
        raise Refused("there is no worker of this version of Carpool at that address")
    peer_nonce, nonce = greeting[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
    writer.write(nonce + proof(secret, b"front", peer_nonce, nonce))
    proven = await reader.readexactly(PROOF_BYTES)
    if not hmac.compare_digest(proven, proof(secret, b"worker", peer_nonce, nonce)):
        raise Refused("the server at that address does not know the fleet's secret")
