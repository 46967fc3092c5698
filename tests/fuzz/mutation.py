"""Changes streams of frames at random: their order, their heads, the numbers and lengths in their fields, and their
bytes.
"""

from __future__ import annotations

import random
import struct

from envd.guest.protocol import HEAD, MAX_FRAME
from tests.fuzz.recording import Frame

_U32 = struct.Struct("<I")
_NUMBERS = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 16, 63, 64, 255, 256, 257, 1023, 4095, 4096, 65535, 65536, 0x7FFFFFFF),
    *(0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFC0, 0xFFFFFFBF, MAX_FRAME, MAX_FRAME - 64, MAX_FRAME + 1),
)
_WORDS = (b"", b".", b"..", b"/", b"/workspace", b"a/../b", b"d", b"x" * 300, b"y/" * 2100, b"\0", b"\xff", b"A=", b"=")
_MOST_FRAMES, _MOST_BYTES = 40, 200_000


class Mutator:
    """A source of changes, repeatable by its seed."""

    def __init__(self, seed: int, kinds: tuple[int, ...]) -> None:
        """kinds: of frames that the reader knows."""
        self.chance = random.Random(seed)
        self._kinds = kinds

    def frames(self, corpus: list[list[Frame]]) -> list[Frame]:
        """A changed stream: a part of one of the corpus, with frames of others."""
        chance = self.chance
        whole = chance.choice(corpus)
        start = chance.randrange(len(whole))
        frames = whole[start : start + chance.randint(1, _MOST_FRAMES)]
        for _ in range(chance.choice((1, 1, 2, 3, 5, 8))):
            self._reorder(frames, corpus) if chance.random() < 0.3 else self._change(frames)
        return frames[:_MOST_FRAMES]

    def stream(self, frames: list[Frame]) -> bytes:
        """Frames as bytes, whose heads lie now and then, and which may end anywhere."""
        chance, parts = self.chance, []
        for identity, kind, fields in frames:
            size = len(fields) + HEAD.size - 4
            if chance.random() < 0.01:
                size = self.number(size)
            parts.append(HEAD.pack(size & 0xFFFFFFFF, identity & 0xFFFFFFFF, kind & 0xFF) + fields)
        data = b"".join(parts)[:_MOST_BYTES]
        if chance.random() < 0.03:
            data = self.bytes(data)
        return data[: chance.randrange(len(data) + 1)] if chance.random() < 0.05 else data

    def number(self, near: int = 0) -> int:
        """A number that code gets wrong, or one near a right one."""
        chance = self.chance
        if chance.random() < 0.4:
            return (near + chance.randint(-9, 9)) & 0xFFFFFFFF
        return chance.choice(_NUMBERS) if chance.random() < 0.8 else chance.getrandbits(32)

    def bytes(self, data: bytes) -> bytes:
        """Bytes with one change."""
        chance, changed = self.chance, bytearray(data)
        at = chance.randrange(len(data) + 1)
        how = chance.randrange(9)
        if how > 6 and len(data) >= 8:
            self._lie(changed)
        elif how == 0 and at < len(data):
            changed[at] ^= 1 << chance.randrange(8)
        elif how == 1 and at < len(data):
            changed[at] = chance.getrandbits(8)
        elif how == 2 and len(data) >= 4:
            at = min(at, len(data) - 4)
            _U32.pack_into(changed, at, self.number(_U32.unpack_from(data, at)[0]))
        elif how == 3:
            changed[at:at] = chance.choice(
                (chance.randbytes(chance.randint(1, 12)), self._text(), _U32.pack(self.number()))
            )
        elif how == 4:
            del changed[at : at + chance.choice((1, 2, 4, 8, 1000))]
        elif how == 5:
            del changed[at:]
        else:
            piece = data[at : at + chance.choice((1, 4, 8, 64))]
            changed[at:at] = piece * chance.choice((1, 2, 50))
        return bytes(changed)

    def _lie(self, fields: bytearray) -> None:
        """Change lengths and counts to those of what follows them: all of it, as items without content, as one item
        that takes all, one too many.
        """
        chance, size = self.chance, len(fields)
        lengths = [at for at in range(size - 3) if _U32.unpack_from(fields, at)[0] <= size - at]
        at = chance.choice(lengths or [0])
        left = size - at - 4
        count = chance.choice((left, left // 4, left // 8, 2, 1)) + chance.choice((-1, 0, 0, 1))
        _U32.pack_into(fields, at, count & 0xFFFFFFFF)
        if left >= 4 and chance.random() < 0.5:
            _U32.pack_into(fields, at + 4, left - 4 - chance.choice((0, 0, 0, 1, 4, 8)) & 0xFFFFFFFF)

    def _text(self) -> bytes:
        word = self.chance.choice(_WORDS)
        return _U32.pack(len(word)) + word

    def _change(self, frames: list[Frame]) -> None:
        chance = self.chance
        at = chance.randrange(len(frames))
        identity, kind, fields = frames[at]
        how = chance.random()
        if how < 0.08:
            identity = chance.choice((0, 1, 2, self.number(identity)))
        elif how < 0.16:
            kind = chance.choice(self._kinds) if chance.random() < 0.9 else chance.getrandbits(8)
        else:
            fields = self.bytes(fields)
        frames[at] = identity, kind, fields

    def _reorder(self, frames: list[Frame], corpus: list[list[Frame]]) -> None:
        chance = self.chance
        at = chance.randrange(len(frames))
        how = chance.randrange(4)
        if how == 0 and len(frames) > 1:
            del frames[at]
        elif how == 1:
            frames[at:at] = [frames[at]] * chance.choice((1, 1, 2, 30))
        elif how == 2:
            frames[at:at] = [chance.choice(chance.choice(corpus))]
        else:
            other = chance.randrange(len(frames))
            frames[at], frames[other] = frames[other], frames[at]
