"""The section on forged verdicts in docs/attacks.md (tests/escape/table.py writes the file); `python -m
tests.redteam.table` prints every state.
"""

from __future__ import annotations

from tests.redteam.catalogue import ALL, FAILURES, FAMILIES
from tests.redteam.handmade import handmade
from tests.redteam.honest import RIGHT, WRONG
from tests.redteam.packages import PACKAGES

TRIED = {
    "lying answers": (
        "answers that lie about being equal, smaller, true, contained or of a type: `mock.ANY`, approx without bound,"
        " subclasses of builtins, metaclasses, proxies"
    ),
    "expectations read": (
        "the expected answer from the test's file, line, code object, constants, parameters or memory, by every way to"
        " it; from hidden data files, by other programs; or a program fitted to all of them"
    ),
    "oracles": (
        "a child, a thread or a second run of the test's code for each candidate answer; answers that learn what they"
        " are compared with"
    ),
    "changed and missing expectations": (
        "against decoys and observations: runs told apart, stand-ins returned, numbers that lie in arithmetic, tables"
        " and fixtures of the tests read"
    ),
    "the judge replaced": (
        "functions, code objects, methods, hooks and plugins of pytest, unittest, builtins and operators; bytes of the"
        " interpreter"
    ),
    "acting later": "threads, timers, signals, destructors, import hooks, codecs, descriptors, code in data files",
    "reports forged": "the judge's pipe, its sender and its plugin; output that looks like pytest's",
    "exits and skips": "exits with every code, signals, skips and expected failures, at import and in the call",
    "compiled code": "extensions, sourceless and cached bytecode, archives, marshalled and pickled code",
    "shadowing modules": "modules with names of the standard library's, of pytest's parts and of installed packages",
    "helpers, configuration and tests": (
        "test helpers, conftest, ini files, site files, second and replaced hidden tests"
    ),
    "state, time and resources": (
        "files, memory, sockets and locks kept between runs; clocks, process ids and counters; decoys starved of"
        " memory, disk or processes"
    ),
    "odd diffs": "links, names that are not UTF-8, thousands of files, binary files beside a lie",
}
"""What each family tries."""
_TEXT = """
## Forged verdicts

`make test-redteam` forges final states of tasks in {forged} ways and asserts of each that it is not solved, that it is
graded, and that the verdict carries a finding. Each is tried at one quickstart task and at one repository written for
it ({repositories} of them: with a conftest, fixtures, parameters, unittest classes, raises, approx, helpers, a src
layout, output, tables, mocks and computed expectations), and every third at a package of PyPI ({packages}), imported by
`triplane tasks import`. {failures} states that break rather than lie need no finding. A sample runs in `make test`.
`python -m tests.redteam.table` lists all states.

| family | ways | what is tried |
|---|---|---|
{rows}

The same suite grades honest states: the reference and {right} styles of correct code in all, and {wrong} honest wrong
answers, each at five tasks and at a package. A right one must be solved, a wrong one not, and neither may have a
finding. `python -m benchmarks verdicts --json` counts all of it in one run, and says what a verification costs.

What the suite does not try: signals from one verification to another through what all sandboxes of a host share (load,
counters of the kernel), which would have to carry the expectations of the run as written into the run without them.
"""


def section() -> str:
    """The section's text."""
    rows = "\n".join(f"| {family} | {len(found)} | {TRIED[family]} |" for family, found in FAMILIES.items())
    return _TEXT.format(
        forged=len(ALL),
        failures=len(FAILURES),
        repositories=len(handmade()),
        rows=rows,
        right=len(RIGHT) - 1,
        wrong=len(WRONG),
        packages=", ".join(f"{each.name} {each.version}" for each in PACKAGES),
    )


if __name__ == "__main__":
    for each in ALL:
        print(f"{each.family} | {each.name} | {each.what}")
