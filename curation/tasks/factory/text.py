"""Instructions without a model: the symptom of a failing test, and what the function's docstring promises.

No line of the fix may stand in it: parts that hold one are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from contracts.digests import digest_of
from curation.tasks.factory.functions import Function

_LONGEST = 600
_SHORT = 12
"""Characters of a line of the fix up to which it is searched as a whole line only."""
_OPENINGS = (
    "{name} in {path} is broken.",
    "There is a bug in {path}: {name} does not do what it should.",
    "{name} ({path}) gives wrong results.",
    "Something is wrong with {name} in {path}.",
)
_MISSING = "{name} in {path} has lost its body. Write it again."
_CLOSING = "Correct the code; the checks that fail now are not part of the repository."


def instruction_of(
    function: Function, failed: dict[str, str], fixed_lines: Sequence[str], strategy: str, identity: str
) -> str | None:
    """Instruction for a bug, or None if each one would hold a line of the fix.

    failed: messages by name of the failing test. fixed_lines: the lines that the fix adds. identity: chooses the words.
    """
    opening = _MISSING if strategy == "remove" else _OPENINGS[int(digest_of(identity)[:8], 16) % len(_OPENINGS)]
    head = opening.format(name=function.qualname, path=function.source.path)
    promise = function.docstring.split("\n\n")[0].strip()
    name = min(failed, key=lambda test: (len(failed[test]) == 0, len(failed[test]), test))
    check, message = name.rpartition("::")[2], failed[name].strip()[:_LONGEST]
    symptom = f"A check named {check} fails" + (f":\n\n{message}" if message else ".")
    more = f"{len(failed) - 1} more fail." if len(failed) > 1 else ""
    contract = f"It should do this: {promise[:_LONGEST]}" if promise else ""
    for parts in (
        [head, contract, symptom, more, _CLOSING],
        [head, symptom, more, _CLOSING],
        [head, contract, f"A check named {check} fails.", more, _CLOSING],
        [head, f"A check named {check} fails.", _CLOSING],
    ):
        text = "\n\n".join(filter(None, parts))
        if not holds_a_line(text, fixed_lines):
            return text
    return None


def holds_a_line(text: str, fixed_lines: Sequence[str]) -> bool:
    """Whether a line of the fix stands in a text: short ones as a whole line, others anywhere."""
    lines = {line.strip() for line in text.split("\n")}
    flat = " ".join(text.split())
    wanted = {" ".join(line.split()) for line in fixed_lines} - {""}
    return any(line in lines or (len(line) > _SHORT and line in flat) for line in wanted)
