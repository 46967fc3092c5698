"""Findings: named attempts of a final state to influence its verdict; most kinds make it unsolved."""

from __future__ import annotations

from collections.abc import Iterable

from contracts.artifacts import Frozen

NOTES = frozenset(
    {
        "undone",
        "restored",
        "compiled",
        "shadowed",
        "undeclared",
        "link",
        "spawned",
        "review",
        "unstable",
        "unconfirmed",
    }
)
"""Kinds that leave the verdict as it is: they were undone, have no effect alone, or prove nothing. All others make the
state unsolved.
"""
SUSPICIONS = frozenset({"review", "spawned"})
"""Notes without meaning on a solved state, whose values were compared and whose decoys failed."""
MOST_FINDINGS = 32
MAX_DETAIL = 300


class Finding(Frozen):
    """One named observation of a final state."""

    name: str
    """`kind:detail`, such as `decoy:tests/test_hidden.py::test_sum` or `patched:builtins.len`; see
    docs/threat-model.md.
    """
    detail: str = ""
    """Explanation for readers."""

    @property
    def kind(self) -> str:
        """Part of the name before the first colon."""
        return self.name.split(":", 1)[0]

    @property
    def tampering(self) -> bool:
        """Whether the finding decides the verdict: a state with it is never solved."""
        return self.kind not in NOTES


def finding(name: str, detail: str = "") -> Finding:
    """Build a finding, limited to a bounded length of printable characters."""
    clean = "".join(each if each.isprintable() else "\\" for each in name.encode(errors="backslashreplace").decode())
    return Finding(name=clean[:MAX_DETAIL], detail=detail[:MAX_DETAIL])


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings without repeated names, each with its first detail; findings that decide the verdict come first."""
    first: dict[str, Finding] = {}
    for each in findings:
        first.setdefault(each.name, each)
    return tuple(sorted(first.values(), key=lambda each: (not each.tampering, each.name))[:MOST_FINDINGS])
