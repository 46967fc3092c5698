"""Faults of a cluster whose nodes are on this machine."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.kubernetes.cluster.world import World

REPAIR = "TRIPLANE_TEST_CLUSTER_UP"
"""Command that starts again what of the cluster has died; without it no kubelet is killed."""
OUTAGE_S = 30.0
VICTIMS = {
    "run": "dagster/run-id,!dagster/op",
    "step": "app.kubernetes.io/component=step_worker",
    "trainer": "app.kubernetes.io/component=trainer",
    "envd": "app.kubernetes.io/component=envd",
    "daemon": "app.kubernetes.io/component=daemon",
    "code": "app.kubernetes.io/component=code",
    "webserver": "app.kubernetes.io/component=webserver",
}
"""Label selectors of the pods that a fault may hit."""

Fault = Callable[[World, random.Random], str | None]
"""Does harm and returns what it hit; None if there is nothing to hit now."""


def _pod(world: World, kind: str, dice: random.Random) -> dict[str, Any] | None:
    pods = [pod for pod in world.get("pods", VICTIMS[kind]) if pod["status"]["phase"] == "Running"]
    pods = [pod for pod in pods if pod["metadata"]["labels"].get("triplane/role") != "step-pool" or _has_step(pod)]
    return dice.choice(pods) if pods else None


def _has_step(pod: dict[str, Any]) -> bool:
    """Whether a pod of the step pool executes a step: a waiting one has three processes."""
    return sum(1 for _ in _processes(pod)) > 3


def _processes(pod: dict[str, Any]) -> Iterator[int]:
    """Processes of a pod's containers, which this machine sees as its own."""
    uid = pod["metadata"]["uid"]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                place = (entry / "cgroup").read_text()
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if (uid in place or uid.replace("-", "_") in place) and b"pause" not in command:
                yield int(entry.name)


def kill(pod: dict[str, Any]) -> None:
    """Kill all processes of a pod's containers, which are then started again."""
    _signal(_processes(pod), signal.SIGKILL)


def _signal(pids: Iterator[int] | list[int], number: int) -> None:
    for pid in list(pids):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _named(program: str) -> list[int]:
    found = subprocess.run(["pgrep", "-f", rf"^(\S*/)?{program} "], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def deleting(kind: str) -> Fault:
    """Delete a pod at once."""

    def fault(world: World, dice: random.Random) -> str | None:
        pod = _pod(world, kind, dice)
        if pod is None:
            return None
        world.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force", check=False)
        return f"deleted {pod['metadata']['name']}"

    return fault


def killing(kind: str) -> Fault:
    """Kill all processes of a pod."""

    def fault(world: World, dice: random.Random) -> str | None:
        pod = _pod(world, kind, dice)
        if pod is None:
            return None
        kill(pod)
        return f"killed {pod['metadata']['name']}"

    return fault


def evicting(kind: str) -> Fault:
    """Evict a pod, as a node under pressure or a drain does."""

    def fault(world: World, dice: random.Random) -> str | None:
        pod = _pod(world, kind, dice)
        if pod is None:
            return None
        name = pod["metadata"]["name"]
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": world.namespace}}
        path = f"/api/v1/namespaces/{world.namespace}/pods/{name}/eviction"
        world.kubectl("create", "--raw", path, "--filename", "-", given=json.dumps(body), check=False)
        return f"evicted {name}"

    return fault


def exhausting(kind: str) -> Fault:
    """Let a container run out of memory, so that the kernel kills what it runs."""

    def fault(world: World, dice: random.Random) -> str | None:
        pod = _pod(world, kind, dice)
        if pod is None:
            return None
        limits = {limit for pid in _processes(pod) if (limit := _memory_limit(pid)) is not None}
        for limit in limits:
            _exhaust(limit)
        for _ in range(20):
            if _out_of_memory(world, pod):
                return f"out of memory: {pod['metadata']['name']}"
            time.sleep(0.5)
        return None

    return fault


_GREEDY = """
import sys
open("/proc/self/oom_score_adj", "w").write("-1000")
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
b"x" * int(sys.argv[2])
"""
"""Asks for memory in a container, which the kernel takes from the container's own processes."""


def _exhaust(limit: Path) -> None:
    """Leave a container no free memory, ask for some, and give its limit back; nothing if it has ended."""
    try:
        before, used = limit.read_text(), int((limit.parent / "memory.usage_in_bytes").read_text())
        limit.write_text(str(used + 2**16))
    except OSError:  # EBUSY: it uses more by now
        return
    more = str(used - _unreclaimable(limit.parent) + 2**26)
    try:
        subprocess.run([sys.executable, "-c", _GREEDY, limit.parent, more], stderr=subprocess.DEVNULL, timeout=30)
    finally:
        with suppress(OSError):
            limit.write_text(before)


def _memory_limit(pid: int) -> Path | None:
    """File of the memory limit of a process's container."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    group = next(line.split(":", 2)[2] for line in lines if ":memory:" in line)
    if group == "/":  # it has left the container
        return None
    return Path("/sys/fs/cgroup/memory") / group.removeprefix("/") / "memory.limit_in_bytes"


def _unreclaimable(group: Path) -> int:
    """Bytes of a control group that the kernel can't take back."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(fields["total_rss"])


def _out_of_memory(world: World, pod: dict[str, Any]) -> bool:
    """Whether a container of the pod was killed for its memory since `pod` was read."""
    found = world.kubectl("get", "pod", pod["metadata"]["name"], "--output", "json", "--ignore-not-found", check=False)
    try:
        now = json.loads(found)
    except ValueError:
        return False

    def kills(of: dict[str, Any]) -> list[Any]:
        return [
            ended["finishedAt"]
            for status in of["status"].get("containerStatuses", [])
            for state in ("state", "lastState")
            if (ended := status[state].get("terminated")) and ended["reason"] == "OOMKilled"
        ]

    return kills(now) != kills(pod)


def drain(world: World, dice: random.Random) -> str | None:
    """Drain the node that keeps no data, and give it back."""
    nodes = json.loads(world.kubectl("get", "nodes", "--output", "json"))["items"]
    others = [node["metadata"]["name"] for node in nodes if node["metadata"]["name"] != world.keeper]
    if not others:
        return None
    node = dice.choice(others)
    options = ("--ignore-daemonsets", "--force", "--delete-emptydir-data", "--timeout=60s")
    world.kubectl("drain", node, *options, check=False, timeout=90)
    time.sleep(10)
    world.kubectl("uncordon", node)
    return f"drained {node}"


def api_server_down(world: World, dice: random.Random) -> str | None:
    """Stop the API server for a while: requests hang."""
    pids = _named("kube-apiserver")
    if not pids:
        return None
    _signal(pids, signal.SIGSTOP)
    try:
        time.sleep(OUTAGE_S)
    finally:
        _signal(pids, signal.SIGCONT)
    return f"API server down {OUTAGE_S:g} s"


def s3_down(world: World, dice: random.Random) -> str | None:
    """Stop the S3 server for a while: requests hang."""
    pods = world.get("pods", "app=s3")
    pids = list(_processes(pods[0])) if pods else []
    _signal(pids, signal.SIGSTOP)
    try:
        time.sleep(OUTAGE_S)
    finally:
        _signal(pids, signal.SIGCONT)
    return f"S3 down {OUTAGE_S:g} s" if pids else None


def kubelet_killed(world: World, dice: random.Random) -> str | None:
    """Kill a kubelet and start it again."""
    repair = os.environ.get(REPAIR)
    pids = _named("kubelet")
    if not repair or not pids:
        return None
    pid = dice.choice(pids)
    os.kill(pid, signal.SIGKILL)
    time.sleep(5)
    subprocess.run(shlex.split(repair), check=True, capture_output=True, timeout=120)
    return f"killed kubelet {pid}"


FAULTS: dict[str, Fault] = {
    **{f"delete {kind}": deleting(kind) for kind in VICTIMS},
    **{f"kill {kind}": killing(kind) for kind in VICTIMS},
    **{f"evict {kind}": evicting(kind) for kind in ("run", "step", "trainer", "code", "daemon")},
    **{f"out of memory {kind}": exhausting(kind) for kind in ("run", "step")},
    "drain": drain,
    "API server down": api_server_down,
    "S3 down": s3_down,
    "kubelet killed": kubelet_killed,
}
