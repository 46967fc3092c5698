"""Lines of a file's bytes: numbered and replaced, in time and memory that hostile content can't raise.

A file of nothing but newlines has as many lines as bytes, so none of this makes a list of them.
"""

from __future__ import annotations

from envd.tools.output import MAX_OUTPUT_BYTES, Output

_BLOCK = 64 * 1024
_TURN = 1024 * 1024
"""Bytes that are counted before other threads have their turn."""
_WHOLE = 64 * 1024
"""Up to this size a file is split into its lines at once, which is quicker."""


def line_count(data: bytes) -> int:
    """Lines of a file; a last one without its newline counts."""
    newlines = sum(data.count(b"\n", at, at + _TURN) for at in range(0, len(data), _TURN))
    return newlines + (1 if data and not data.endswith(b"\n") else 0)


def numbered(data: bytes, start: int, end: int) -> Output:
    """The lines from `start` to `end` (from 1, both there), each behind its number."""
    if len(data) <= _WHOLE:
        return _joined(data.split(b"\n", end)[start - 1 : end], start)
    first, stop = _line_start(data, start), _line_end(data, end)
    true_bytes = stop - first + digits(start, end) + (end - start + 1)
    if true_bytes <= MAX_OUTPUT_BYTES:
        return _joined(data[first:stop].split(b"\n"), start)
    return Output.of_parts(_head(data, first, stop, start), _tail(data, first, stop, end), true_bytes, MAX_OUTPUT_BYTES)


def replace_line(data: bytes, number: int, new: bytes) -> bytes:
    """The file with one line replaced, which must be there; a newline at the end of `new` does not count."""
    start = _line_start(data, number)
    end = data.find(b"\n", start)
    return data[:start] + new.removesuffix(b"\n") + (data[end:] if end >= 0 else b"")


def _joined(lines: list[bytes], start: int) -> Output:
    output = Output(MAX_OUTPUT_BYTES)
    output.feed(b"\n".join(b"%d %b" % (number, line) for number, line in enumerate(lines, start)))
    return output


def _head(data: bytes, at: int, stop: int, number: int) -> bytes:
    """The numbered lines from `number`, which begins at `at`: at least what is shown, where there is more than that."""
    head = bytearray()
    while at <= stop and len(head) < MAX_OUTPUT_BYTES // 2:
        end = data.find(b"\n", at, stop)
        end = end if end >= 0 else stop
        head += b"%d %b\n" % (number, data[at : min(end, at + MAX_OUTPUT_BYTES)])
        number, at = number + 1, end + 1
    return bytes(head[: MAX_OUTPUT_BYTES // 2])


def _tail(data: bytes, first: int, stop: int, number: int) -> bytes:
    """As `_head`, of the numbered lines that end with `number`, which ends at `stop`."""
    tail: list[bytes] = []
    size = 0
    while stop >= first and size <= MAX_OUTPUT_BYTES // 2:
        begin = data.rfind(b"\n", first, stop) + 1 or first
        shown = max(begin, stop - MAX_OUTPUT_BYTES)
        tail.append((b"%d " % number if shown == begin else b"") + data[shown:stop])
        size += len(tail[-1]) + 1
        number, stop = number - 1, begin - 1
    return b"\n".join(reversed(tail))[-(MAX_OUTPUT_BYTES // 2) :]


def digits(start: int, end: int) -> int:
    """How many digits the numbers from start to end have together."""
    total = 0
    power = 1
    while power <= end:
        total += end - max(start, power) + 1
        power *= 10
    return total


def _line_start(data: bytes, number: int) -> int:
    """Where a line begins, by counting newlines a block at a time."""
    missing = number - 1
    if not missing:
        return 0
    for at in range(0, len(data), _BLOCK):
        inside = data.count(b"\n", at, at + _BLOCK)
        if inside >= missing:
            found = at - 1
            for _ in range(missing):
                found = data.find(b"\n", found + 1)
            return found + 1
        missing -= inside
    raise IndexError(f"the file has no line {number}")


def _line_end(data: bytes, number: int) -> int:
    end = data.find(b"\n", _line_start(data, number))
    return end if end >= 0 else len(data)
