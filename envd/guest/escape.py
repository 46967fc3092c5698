"""Byte stuffing of a stream that a snapshot may cut in the middle of a frame, so that a new server can start it anew.

0xFF goes as 0xFF 0x00; a reset is 0xFF 0x01 and a nonce. The server's first bytes are a reset; it skips what it reads
until the guest sends the same one back. envd/native/protocol.h says what the guest does.
"""

from __future__ import annotations

import os

from envd.guest.protocol import ProtocolError

_RESET = b"\xff\x01"
_NONCE = 7
_LITERAL, _STUFFED = b"\xff", b"\xff\x00"


class Escape:
    """The server's end of an escaped stream."""

    def __init__(self) -> None:
        nonce = bytes(byte % 255 for byte in os.urandom(_NONCE))
        self.reset = _RESET + nonce
        """What is to be sent first."""
        self._skipping = True
        self._left = b""

    def encode(self, data: bytes) -> bytes:
        """A frame as it goes over the stream."""
        return data.replace(_LITERAL, _STUFFED)

    def decode(self, data: bytes) -> bytes:
        """What arrived, as frames. Raises ProtocolError for what is no stuffing."""
        data = self._left + data
        self._left = b""
        if self._skipping:
            at = data.find(self.reset)
            if at < 0:
                self._left = data[-(len(self.reset) - 1) :]
                return b""
            self._skipping = False
            data = data[at + len(self.reset) :]
        if data.endswith(_LITERAL):
            data, self._left = data[:-1], _LITERAL
        if data.count(_LITERAL) != data.count(_STUFFED):
            raise ProtocolError("byte 255 is not escaped")
        return data.replace(_STUFFED, _LITERAL)
