"""Verification in a fresh sandbox of any backend: send the verifier in, run it with the guest's Python, and read its
signed result.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import secrets
import struct
import zlib
from typing import Any

from envd.backends.base import Backend, BoxSpec
from envd.errors import EnvdError, SandboxGone, SandboxStartError
from envd.guest.link import GuestLink
from envd.guest.protocol import CHUNK
from envd.sandbox import wire
from envd.sandbox.in_guest import BOOT, KEY_BYTES
from envd.server.guest_bundle import bundle
from envd.server.guestprocess import candidates

_RING = 16 * 1024 * 1024
"""Bytes of output that are kept, enough for any result: the most that a guest's agent allows."""
_POLL_S, _FULL_S = 20.0, 0.005
_FLAGS = ("-P", "-s", "-B", "-c")


async def verify_in_guest(backend: Backend, spec: BoxSpec, request: bytes, timeout_s: float) -> dict[str, Any]:
    """Run the verifier on a request (a frame of `envd.sandbox.wire`) in a fresh sandbox, destroy the sandbox and return
    the verifier's reply.

    Raises SandboxGone if there is no reply: the sandbox or its Python failed or hung.
    """
    sent = await asyncio.to_thread(bundle, not spec.runtime)
    box = await backend.create(spec)
    try:
        async with asyncio.timeout(timeout_s):
            return await _ask(box.guest, backend.name, sent, request, timeout_s)
    except TimeoutError as error:
        raise SandboxGone(f"the verifier in a {backend.name} sandbox hung: no verdict in {timeout_s:g} s") from error
    except OSError as error:
        raise SandboxGone(f"the verifier in a {backend.name} sandbox failed: {error}") from error
    finally:
        await box.destroy()


async def _ask(guest: GuestLink, name: str, sent: bytes, request: bytes, timeout_s: float) -> dict[str, Any]:
    process = await _start(guest, name, timeout_s)
    key = secrets.token_bytes(KEY_BYTES)
    feeding = asyncio.ensure_future(
        _feed(guest, process, struct.pack("<QQ", len(sent), len(request)) + sent + request + key)
    )
    try:
        output = await _output(guest, process, 1)
    finally:
        feeding.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError, EnvdError):
            await feeding
    reply = _signed(output, key)
    if reply is None:
        said = (await _output(guest, process, 2)).decode(errors="replace").strip().splitlines()
        raise SandboxGone(
            f"the verifier in a {name} sandbox ended without a verdict: {said[-1][:300] if said else 'no output'}"
        )
    if "failed" in reply:
        raise SandboxGone(f"the verifier in a {name} sandbox failed: {reply['failed']}")
    return reply


async def _start(guest: GuestLink, name: str, timeout_s: float) -> int:
    for program in candidates("python3"):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            arguments = [program, *_FLAGS, BOOT]
            return (await guest.start(arguments, stdin=True, timeout_s=timeout_s, ring=_RING))[0]
    raise SandboxStartError(f"sandboxes of the {name} backend have no python3: verdicts need one (3.11 or newer)")


async def _feed(guest: GuestLink, process: int, data: bytes) -> None:
    at = 0
    while at < len(data):
        took = await guest.stdin(process, data[at : at + CHUNK])
        at += took
        if not took:
            await asyncio.sleep(_FULL_S)
    await guest.close_stdin(process)


async def _output(guest: GuestLink, process: int, channel: int) -> bytes:
    """Output of a channel; only its end if there was more than is kept."""
    found = bytearray()
    offset = 0
    while True:
        chunk = await guest.output(process, channel, offset, wait_s=_POLL_S)
        found += chunk.data
        del found[:-_RING]
        offset = chunk.start + len(chunk.data)
        if chunk.ended and not chunk.data:
            return bytes(found)


def _signed(output: bytes, key: bytes) -> dict[str, Any] | None:
    """Reply in the last line that is signed with the key, ignoring all other output; None if there is none."""
    for line in reversed(output.split(b"\n")):
        mark, _, text = line.partition(b" ")
        try:
            said = base64.b64decode(text, validate=True)
        except ValueError:
            continue
        if text and hmac.compare_digest(hmac.new(key, said, hashlib.sha256).hexdigest().encode(), mark):
            frame = zlib.decompressobj().decompress(said, wire.MAX_HEADER)
            header, _ = wire.lengths(frame[: wire.HEAD.size])
            reply: dict[str, Any] = json.loads(frame[wire.HEAD.size : wire.HEAD.size + header])
            return reply
    return None
