"""Hidden tests run on the backend that the agent's sandboxes run on, with the verdicts that namespaces give, and nobody
else signs a result.
"""

from __future__ import annotations

import json
import os
import random
import string
import struct
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from envd.client import VerifyResult
from envd.errors import RulesDenied
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from envd.sandbox.in_guest import signed
from envd.sandbox.verdict import observations
from envd.server.guest_bundle import bundle
from envd.server.guest_verifications import _RING, _signed
from tests.envd.gvisors import require_runsc
from tests.envd.harness import FILES, HIDDEN, TESTS, Harness
from tests.envd.stand_ins import qemu_image

RIGHT = "def add(a, b):\n    return a + b\n"
SPEAKS = """
import glob, json, os
for path in glob.glob("/proc/[0-9]*/fd/[0-9]*"):
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        forged = json.dumps({"result": {"outcomes": [], "exit": "completed"}}).encode().hex().encode()
        os.write(fd, b"\\n" + b"0" * 64 + b" " + forged + b"\\n")
        os.close(fd)
    except OSError:
        pass
"""
STATES = {
    "right": {"calc.py": RIGHT},
    "wrong": {},
    "leaves": {"calc.py": "import os\nos._exit(0)\n"},
    "crashes": {"calc.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"},
    "configures": {"conftest.py": "raise SystemExit\n", "calc.py": RIGHT},
    "equals": {"calc.py": "class E(int):\n    def __eq__(self, o): return True\n\ndef add(a, b):\n    return E()\n"},
    "speaks": {"calc.py": f"{SPEAKS}\n\ndef add(a, b):\n    return 0\n"},
}
PACKAGES = ("envd", "contracts", "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")
REPLACES = """
import os
try:
    os.chmod("tests", 0o777)
    os.rename("tests/test_hidden.py", "tests/gone")
except OSError:
    pass
open("tests/test_hidden.py", "w").write("def test_small(): pass\\ndef test_zero(): pass\\n")
"""
SECRETS = """
import os
found = []
for path in (f"/proc/{os.getppid()}/mem", f"/proc/{os.getppid()}/environ", "/proc/sys/kernel/core_pattern"):
    try:
        open(path, "r+b").close()
        found.append(path)
    except OSError:
        pass
for name in os.listdir("/tmp"):
    if name.startswith(".judge") and name.endswith("-scratch"):
        try:
            found += os.listdir(f"/tmp/{name}")
        except OSError:
            pass
try:
    os.kill(os.getppid(), 0)
    found.append("signal")
except OSError:
    pass
print("FOUND", found)
"""


def without_time(result: VerifyResult) -> tuple[object, ...]:
    return (result.outcomes, result.exit)


@pytest.fixture(scope="module")
def gvisor() -> Iterator[Harness]:
    require_runsc()
    with LocalEnvd("gvisor", log_level="error") as server:
        yield Harness(server.address)


@pytest.fixture(scope="module")
def qemu() -> Iterator[Harness]:
    qemu_image()
    with LocalEnvd("qemu", log_level="error") as server:
        yield Harness(server.address)


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) for name in ("gvisor", "qemu")])
def guest(request: pytest.FixtureRequest) -> tuple[str, Harness]:
    return str(request.param), request.getfixturevalue(request.param)


def test_verdicts_are_those_of_namespaces(guest: tuple[str, Harness], namespaces: Harness) -> None:
    name, harness = guest
    for state, changes in STATES.items():
        theirs, ours = harness.verify(changes, timeout_s=60), namespaces.verify(changes, timeout_s=60)
        assert without_time(theirs) == without_time(ours), state
        assert (theirs.backend, ours.backend) == (name, "namespaces")
        assert sorted(theirs.tampering) == sorted(ours.tampering), state


def test_tests_are_not_replaced_and_their_judge_is_out_of_reach(guest: tuple[str, Harness]) -> None:
    _, harness = guest
    replaced = harness.verify({"calc.py": f"{REPLACES}\n\ndef add(a, b):\n    return 0\n"}, timeout_s=60)
    assert [each.status for each in replaced.outcomes] != ["passed", "passed"]
    looked = harness.verify({"calc.py": f"{SECRETS}\n{RIGHT}"}, timeout_s=60)
    assert "FOUND []" in looked.log, looked.log


def test_a_deadline_ends_in_a_verdict(guest: tuple[str, Harness]) -> None:
    _, harness = guest
    endless = harness.verify({"calc.py": "while True: pass\n"}, timeout_s=5)
    assert endless.exit == "timed_out" and {each.status for each in endless.outcomes} == {"missing"}


def test_plain_verifies_in_plain_and_says_so(plain: Harness) -> None:
    assert plain.verify({"calc.py": RIGHT}).backend == "plain"


def test_rules_choose_the_backend_of_a_verdict_as_of_a_sandbox() -> None:
    async def job(client: OperationsClient) -> None:
        template = await client.put_template(FILES)
        assert (await client.verify(template, b"", HIDDEN, TESTS)).backend == "plain"
        assert (await client.verify(template, b"", HIDDEN, TESTS, backend="namespaces")).backend == "namespaces"
        assert (await client.verify(template, b"", HIDDEN, TESTS, rules="isolation: process")).backend == "namespaces"
        with pytest.raises(RulesDenied, match="isolation"):
            await client.verify(template, b"", HIDDEN, TESTS, rules="isolation: machine")
        with pytest.raises(RulesDenied, match="isolation"):
            await client.verify(template, b"", HIDDEN, TESTS, backend="plain", rules="isolation: process")

    with LocalEnvd("plain,namespaces", log_level="error") as server:
        Harness(server.address).client(job)


def test_only_the_signed_line_is_believed() -> None:
    key, reply = os.urandom(32), {"result": {"exit": "completed"}}
    line = signed(reply, key)
    mark, _, said = line.partition(" ")
    assert _signed(f"noise\n{line}\nnoise".encode(), key) == reply
    for forged in (b"", b"\n", signed(reply, b"x" * 32).encode(), f"{mark} AA==".encode(), b"\xff " + said.encode()):
        assert _signed(forged, key) is None


def test_the_largest_result_fits_what_a_guest_keeps() -> None:
    rng, key = random.Random(1), os.urandom(32)
    values = [json.dumps(["s", "".join(rng.choices(string.printable, k=50_000))]) for _ in range(200)]
    seen = observations([("see", "tests/test_hidden.py::test_small", "0:0", "", each) for each in values])
    reply = {"result": asdict(VerifyResult((), "completed", "", observations=seen))}
    line = signed(reply, key)
    assert len(seen) < len(values) and len(line) < _RING
    assert _signed(line.encode(), key) == json.loads(json.dumps(reply))


def test_large_observations_leave_a_guest(guest: tuple[str, Harness]) -> None:
    line = "[__see__(str(n), random.randbytes(90_000)) for n in range(42)]"
    hidden = {"tests/test_hidden.py": f"import random\n\n\ndef test_small():\n    {line}\n".encode()}
    found = guest[1].verify({}, hidden=hidden, tests=TESTS[:1], timeout_s=60)
    assert len(found.observations) == 42 and [each.status for each in found.outcomes] == ["passed"]


def test_the_bundle_holds_the_verifier_and_nothing_of_the_server() -> None:
    sent, names, at = bundle(), set[str](), 0
    while at < len(sent):
        name, size = struct.unpack_from("<HI", sent, at)
        names.add(sent[at + 6 : at + 6 + name].decode())
        at += 6 + name + size
    assert {"envd/sandbox/verifier.py", "envd/sandbox/in_guest.py", "_pytest/python.py", "pytest/__init__.py"} <= names
    assert {name.partition("/")[0] for name in names} <= {
        *PACKAGES,
        *(f"{each}.py" for each in PACKAGES),
        "__pycache__",
    }
    assert not any(name.startswith(("envd/server/", "envd/backends/")) for name in names)
    assert len(sent) < 16 << 20
