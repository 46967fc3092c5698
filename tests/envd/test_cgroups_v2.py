"""Limits by cgroup v2 alone, on a kernel that has nothing else: a machine under QEMU. What runs in it is this tree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envd.client import Limits, ToolCall
from envd.local import LocalEnvd
from envd.operations.client import ManagedSandbox, OperationsClient
from tests.envd.harness import Harness
from tests.envd.stand_ins import qemu_image

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
USER = 1000
PREPARE = f"""(
set -e
chmod 755 envd/native/bin/envd-guest envd/native/bin/envd-spawn
python3 -c "import ctypes; ctypes.CDLL(None).mount(b'none', b'/sys/fs/cgroup', b'cgroup2', 0, None)"
cd /sys/fs/cgroup
echo +memory +pids +cpu > cgroup.subtree_control
mkdir alone shared user
chown {USER} user user/cgroup.procs user/cgroup.subtree_control
mkdir /tmp/user && chown {USER} /tmp/user
)"""


@pytest.fixture(scope="module")
def machines() -> Iterator[Harness]:
    qemu_image()
    with LocalEnvd("qemu") as server:
        yield Harness(server.address)


def tree() -> dict[str, bytes]:
    """What the payload imports, with the native helpers and the sources that they are checked against."""
    found = [path for name in ("envd", "contracts") for path in (ROOT / name).rglob("*") if path.is_file()]
    wanted = [path for path in found if not {"__pycache__", "sanitize"} & {*path.parts}]
    wanted += [ROOT / "tests" / "envd" / "cgroups_payload.py"]
    return {str(path.relative_to(ROOT)): path.read_bytes() for path in wanted}


async def run(sandbox: ManagedSandbox, group: str, uid: int, *, beside: str = "") -> dict[str, Any]:
    inner = f"echo 0 > /sys/fs/cgroup/{group}/cgroup.procs; {beside} exec python3 tests/envd/cgroups_payload.py {uid}"
    where = "TMPDIR=/tmp/user " if uid else ""
    said = await sandbox.call(ToolCall("exec", {"command": f"{where}sh -c '{inner}' 2>&1"}), timeout_s=120)
    assert said.ok, said.text
    line = next(each for each in said.text.splitlines() if each.startswith("{"))
    answer: dict[str, Any] = json.loads(line)
    return answer


def test_a_server_in_a_group_of_its_own_holds_every_limit_as_root_and_as_an_ordinary_user(machines: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        sandbox = await client.create(await client.put_template(tree()), limits=Limits(memory_mb=768, disk_mb=128))
        assert (prepared := await sandbox.call(ToolCall("exec", {"command": PREPARE}), timeout_s=60)).ok, prepared.text
        for group, uid in (("alone", 0), ("user", USER)):
            found = await run(sandbox, group, uid)
            assert found["enforced"] == ["cpu", "disk", "memory", "pids"], (group, found)
            assert "memory 137\n" in found["said"] and found["events"] == ["memory", "pids"], (group, found)
            assert found["left"] == ["beside-sandboxes"], (group, found)
        found = await run(sandbox, "shared", 0, beside="sleep 60 &")
        assert found["enforced"] == ["disk"] and found["left"] == [], "others' processes are left where they are"
        await sandbox.close()

    machines.client(job)
