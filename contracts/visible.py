"""Escape terminal control sequences in text of policies, sandboxes and repositories before it is shown.

Escaped are control characters (C0 without tab and newline, DEL, C1) and overrides of the writing direction. A carriage
return before a newline stays, since it has no effect there. All other text is unchanged. Interfaces for raw bytes do
not use this module.
"""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")


def visible(text: str) -> str:
    """Text with each control character as `\\x1b` and each override of direction as `\\u202e`."""
    return _CONTROL.sub(_spelled, text)


def _spelled(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def visible_json(text: str) -> str:
    """JSON with the same characters escaped as in JSON; its value is unchanged."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
