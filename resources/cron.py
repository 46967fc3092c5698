"""Check of cron expressions, without importing Dagster, whose schedules use them."""

from __future__ import annotations

import re

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of month", 1, 31, {}),
    ("month", 1, 12, {name: number for number, name in enumerate(_MONTHS, 1)}),
    ("day of week", 0, 7, {name: number for number, name in enumerate(_DAYS)}),
)
_ITEM = re.compile(r"(?:\*|(\w+)(?:-(\w+))?)(?:/([0-9]+))?", re.ASCII)
_LONGEST = {2: 29, 4: 30, 6: 30, 9: 30, 11: 30}
"""Days of the months that have fewer than 31."""


def cron_fault(expression: str) -> str:
    """What is wrong with a cron expression of five fields; empty if nothing is."""
    fields = expression.lower().split()
    if len(fields) != len(_FIELDS):
        return f"{len(fields)} fields"
    sets = []
    for text, (name, low, high, names) in zip(fields, _FIELDS, strict=True):
        found = {item: _values(item, low, high, names) for item in text.split(",")}
        for item, values in found.items():
            if not values:
                return f"{name} {item!r} is not within {low} to {high}"
        sets.append({value for values in found.values() for value in values})
    if fields[4] == "*" and all(min(sets[2]) > _LONGEST.get(month, 31) for month in sets[3]):
        return "no month has this day"
    return ""


def _values(item: str, low: int, high: int, names: dict[str, int]) -> range:
    """Values that an item such as *, 1-5 or 10-20/2 stands for; empty if it is malformed."""
    found = _ITEM.fullmatch(item)
    if found is None:
        return range(0)
    ends = [names.get(end, int(end) if end.isdecimal() else -1) for end in found.groups()[:2] if end]
    first, last = (ends[0], ends[-1]) if ends else (low, high)
    step = int(found[3] or 1)
    return range(first, last + 1, step) if low <= first <= last <= high and 1 <= step <= high else range(0)
