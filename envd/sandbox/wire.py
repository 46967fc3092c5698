"""Frames between the server and processes in a sandbox: two lengths, a JSON header, a binary blob.

Both sides bound the lengths that they accept, since code in a sandbox may control its agent.
"""

from __future__ import annotations

import array
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

HEAD = struct.Struct(">II")
MAX_HEADER = 80 * 1024 * 1024
MAX_BLOB = 64 * 1024 * 1024
MAX_REQUEST = 128 * 1024
"""Bytes of a request to the zygote, which is one datagram."""


def receive_fds(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Receive a datagram and up to `most` descriptors, with close-on-exec set.

    socket.recv_fds of Python 3.11 ignores its flags, so that programs would inherit its descriptors.
    """
    descriptors = array.array("i")
    data, beside, _, _ = sock.recvmsg(size, socket.CMSG_LEN(most * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
    return data, list(descriptors)


def pack(header: dict[str, Any], blob: bytes = b"") -> bytes:
    """Return one frame as bytes."""
    body = json.dumps(header, separators=(",", ":")).encode()
    return HEAD.pack(len(body), len(blob)) + body + blob


def lengths(head: bytes) -> tuple[int, int]:
    """Header and blob lengths of a frame. Raises ValueError for a frame beyond the bounds."""
    header, blob = HEAD.unpack(head)
    if header > MAX_HEADER or blob > MAX_BLOB:
        raise ValueError(f"frame of {header} + {blob} bytes exceeds the maximum size")
    return header, blob


def cut(blob: bytes, sizes: Sequence[tuple[str, int]]) -> tuple[dict[str, bytes], bytes]:
    """Files at the beginning of a blob, by path, and what follows them."""
    files, start = {}, 0
    for path, size in sizes:
        files[path] = blob[start : start + size]
        start += size
    return files, blob[start:]


def send(sock: socket.socket, header: dict[str, Any], blob: bytes = b"") -> None:
    """Send one frame, blocking."""
    sock.sendall(pack(header, blob))


def receive(sock: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """Receive one frame, blocking. Returns None if the peer has closed. Raises ValueError beyond the bounds."""
    head = _exactly(sock, HEAD.size)
    if head is None:
        return None
    header_length, blob_length = lengths(head)
    header, blob = _exactly(sock, header_length), _exactly(sock, blob_length)
    if header is None or blob is None:
        return None
    return json.loads(header), blob


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        chunk = sock.recv(min(count - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
