"""The table of attacks in docs/attacks.md: `python -m tests.escape.table` writes it, a test holds that it agrees."""

from __future__ import annotations

from pathlib import Path

from tests.escape.attack import BACKENDS, Attack
from tests.escape.catalogue import ALL
from tests.redteam.table import section

PATH = Path(__file__).resolve().parents[2] / "docs" / "attacks.md"
_HEAD = """\
# Attacks that are tried

`make test-escape` tries each of these {count} attacks on every backend that starts on the machine: namespaces, gVisor
and QEMU. It asserts that the attempt was stopped; that a neighbour sandbox still answers, with its secret, its process
and its services untouched; that the host's canaries, mounts, control groups, processes, settings and clock are as they
were; that the server's memory stays bounded; and that there is an audit event (docs/sandboxes-rules.md lists the
kinds). The plain backend isolates nothing and is left out; a few attempts are shown to succeed there, so that they are
known to be real ones.

An event of the refusal says that something was denied, limited or tampered with: {with_event} attacks assert one. How
the others end is not visible outside the sandbox, so their event is that of the call: the servers run with
`--audit-calls`, and the test asserts that `call.begun` or `call.made` of the attack's sandbox names what was run. It
tells who asked for what and when, not that it was an attack, nor that it failed; a server without `--audit-calls` has
no event of these.

Verdicts are given on the backend of the agent's sandbox. The attacks on verdicts run on namespaces; on gVisor and QEMU
one of them, reward-conftest, is graded, since a verdict takes seconds there.

This table is made from `tests/escape/` by `python -m tests.escape.table`.
"""
_WHERE = """
## What the last columns mean

{with_event} of the {count} attacks assert an event of one of the named kinds. The other {without} assert the event of
the call instead, and so do the former on a backend that the last column names; the column gives the reason. A system
call that Landlock, a missing capability or the guest's own kernel refuses returns an error and causes no event.
"""


def table() -> str:
    """The whole document."""
    without = sum(not attack.audit for attack in ALL)
    numbers = {"count": len(ALL), "without": without, "with_event": len(ALL) - without}
    parts = [_HEAD.format(**numbers)]
    for family in dict.fromkeys(attack.family for attack in ALL):
        rows = [_row(attack) for attack in ALL if attack.family == family]
        parts.append(
            "\n".join(
                [
                    f"\n## {family.capitalize()}\n",
                    "| attack | what is tried | event of the refusal | why the event is the call's |",
                    "|---|---|---|---|",
                    *rows,
                    "",
                ]
            )
        )
    parts.append(_WHERE.format(**numbers))
    parts.append(
        _notes("Where one succeeds", "succeeds_on", "Known, and expected by the test, which fails once it is stopped.")
    )
    parts.append(
        _notes(
            "Where it may succeed without harm",
            "harmless_on",
            "These runs also check that host and neighbours are unharmed.",
        )
    )
    parts.append(_notes("Where one is not tried", "not_on", ""))
    parts.append(section())
    return "".join(parts)


def _row(attack: Attack) -> str:
    event = " or ".join(f"`{kind}`" for kind in attack.audit) or "the call's"
    why = "; ".join([*filter(None, [attack.unseen]), *(f"{name}: {why}" for name, why in attack.unseen_on.items())])
    return f"| {attack.name} | {attack.what.replace('|', chr(92) + '|')} | {event} | {why} |"


def _notes(title: str, field: str, words: str) -> str:
    reasons: dict[tuple[str, str], list[str]] = {}
    for attack in ALL:
        for backend, reason in getattr(attack, field).items():
            reasons.setdefault((backend, reason), []).append(attack.name)
    if not reasons:
        return ""
    ordered = sorted(reasons.items(), key=lambda item: BACKENDS.index(item[0][0]))
    lines = [f"- {backend}: {reason} ({', '.join(names)})" for (backend, reason), names in ordered]
    return "\n".join([f"\n## {title}\n", *([words, ""] if words else []), *lines, ""])


if __name__ == "__main__":
    PATH.write_text(table())
