"""Output of bounded size: the head and the tail are kept, the true size is stated."""

from __future__ import annotations

from contracts.visible import visible

MAX_OUTPUT_BYTES = 16 * 1024
"""What a policy is shown of one call, in bytes; half from the head, half from the tail."""
_MAX_INT64 = 2**63 - 1


class Output:
    """Collects bytes in constant memory. The same bytes give the same text, however they were chunked."""

    def __init__(self, limit: int = MAX_OUTPUT_BYTES) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.true_bytes = 0

    @classmethod
    def of_parts(cls, head: bytes, tail: bytes, true_bytes: int, limit: int = MAX_OUTPUT_BYTES) -> Output:
        """The output of `true_bytes` bytes that begins with head and ends with tail; what is between is not needed.

        Head and tail together hold all of it, or at least half the limit each. Sizes that do not fit each other do no
        harm.
        """
        output = cls(limit)
        output.feed(head)
        output.feed(tail)
        output.true_bytes = min(max(true_bytes, output.true_bytes), _MAX_INT64)
        return output

    def feed(self, data: bytes) -> None:
        """Add output."""
        self.true_bytes += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > 4 * self._half:
            del self._tail[: -self._half]

    @property
    def truncated(self) -> bool:
        """Whether the text leaves anything out."""
        return self._parts()[2] > 0

    def text(self) -> str:
        """The output as UTF-8 text (invalid bytes replaced, control characters spelled out), cut in the middle where it
        is too long.
        """
        head, tail, cut = self._parts()
        return f"{head}\n[{cut} of {self.true_bytes} bytes cut]\n{tail}" if cut else head

    def _parts(self) -> tuple[str, str, int]:
        """What is shown of the beginning and of the end, and how many bytes between them are left out."""
        if self.true_bytes <= 2 * self._half:
            whole = (self._head + self._tail).decode(errors="replace")
            shown = visible(whole)
            if shown == whole or len(shown) <= 2 * self._half:
                return shown, "", 0
            head, tail = whole[: len(whole) // 2], whole[len(whole) // 2 :]
        else:
            head = self._head.decode(errors="replace")
            tail = self._tail[-self._half :].decode(errors="replace")
        first, last = _fitting(head, self._half), _fitting(tail[::-1], self._half)
        left = max(self.true_bytes - 2 * self._half, 0)
        left += len(head[first:].encode()) + len(tail[: len(tail) - last].encode())
        return visible(head[:first]), visible(tail[len(tail) - last :]), left


def _fitting(text: str, most: int) -> int:
    """How many characters of a text take at most so many once they are spelled out."""
    if len(visible(text)) <= most:
        return len(text)
    size = 0
    for index, letter in enumerate(text):
        size += len(visible(letter + "-")) - 1
        if size > most:
            return index
    return len(text)
