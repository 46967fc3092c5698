"""Scheduler and kubelet of a stand-in cluster: a pod's command runs as a process of this machine.

No isolation, no image, no DNS: the image's name only decides if it can be "pulled"; in the values of variables a name
`POD.SERVICE` becomes `localhost`, and /tmp a folder of the pod. That folder has the same path in every pod and another
content, as on several nodes: it hides the folders of the other pods. It also holds HOME, the cache and temporary files.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.kubernetes.objects import Object, Objects, now

ROOT = Path(__file__).parents[2]


class Kubelet:
    """Runs pods. capacity: what the only node has of each resource besides CPU and memory."""

    def __init__(self, objects: Objects, folder: Path, environment: Mapping[str, str]) -> None:
        self.objects, self.folder, self.environment = objects, folder, dict(environment)
        self.capacity: dict[str, int] = {"nvidia.com/gpu": 8}
        self.missing_images: set[str] = set()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.lost: set[str] = set()
        """Uids of pods on nodes that do not answer: they stay until they are deleted without a grace period."""
        self.disk = folder / "disk"
        """Path of every pod's own disk, where the machine has mount namespaces; else the parent of those disks."""
        self._marks: dict[str, str] = {}
        self._kill_at: dict[str, float] = {}

    def sync(self) -> None:
        """Take one step with each pod."""
        with self.objects.lock:
            for pod in self.objects.all("pods"):
                self._sync(pod)

    def log(self, pod: Object) -> Path:
        return self.folder / f"{pod['metadata']['uid']}.log"

    def stop(self) -> None:
        for process in self.processes.values():
            _signal(process, signal.SIGKILL)
            process.wait()

    def kill(self, pod: Object, number: int = signal.SIGKILL, reason: str = "") -> None:
        """Signal every process of a pod. reason: of the container's end, such as OOMKilled."""
        uid = pod["metadata"]["uid"]
        if reason:
            self._marks[uid] = reason
        if uid in self.processes:
            _signal(self.processes[uid], number)

    def delete(self, pod: Object, grace_s: float | None) -> None:
        """Begin to delete a pod; its process gets SIGTERM, and SIGKILL after the grace period."""
        meta, grace = pod["metadata"], grace_s
        if grace is None:
            grace = pod["spec"].get("terminationGracePeriodSeconds", 30)
        uid = meta["uid"]
        if "deletionTimestamp" not in meta:
            meta["deletionTimestamp"] = now()
            self.objects.touch(pod)
            if uid not in self.lost:
                self.kill(pod, signal.SIGTERM)
        if grace == 0:
            meta["deletionGracePeriodSeconds"] = 0
        self._kill_at[uid] = min(self._kill_at.get(uid, float("inf")), time.monotonic() + grace)

    def disrupt(self, pod: Object, reason: str, message: str) -> None:
        """Evict or preempt a pod: its condition DisruptionTarget names the reason, then it is deleted."""
        conditions = pod["status"].setdefault("conditions", [])
        conditions.append({"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message})
        self.delete(pod, None)

    def lose(self, pod: Object) -> None:
        """Lose the node of a pod, which goes on there: Kubernetes deletes the pod, and nobody confirms that."""
        self.lost.add(pod["metadata"]["uid"])
        said = "Taint manager: deleting due to NoExecute taint"
        self.disrupt(pod, "DeletionByTaintManager", said)

    def _sync(self, pod: Object) -> None:
        uid, phase = pod["metadata"]["uid"], pod["status"].get("phase")
        if uid in self.lost:
            if time.monotonic() >= self._kill_at[uid] and "deletionGracePeriodSeconds" in pod["metadata"]:
                self.objects.remove(pod, "pods")
            return
        process = self.processes.get(uid)
        if process is not None and process.poll() is not None and phase == "Running":
            self._ended(pod, process.returncode)
        elif "deletionTimestamp" in pod["metadata"]:
            if process is not None and process.poll() is None:
                if time.monotonic() >= self._kill_at[uid]:
                    _signal(process, signal.SIGKILL)
                return
            self.objects.remove(pod, "pods")
        elif phase == "Pending" and process is None and self._scheduled(pod):
            self._start(pod)

    def _scheduled(self, pod: Object) -> bool:
        if any(each["type"] == "PodScheduled" and each["status"] == "True" for each in pod["status"]["conditions"]):
            return True
        used: dict[str, int] = {}
        for other in self.objects.all("pods"):
            if other["status"].get("phase") in ("Pending", "Running") and other["spec"].get("nodeName"):
                for name, amount in _limits(other).items():
                    used[name] = used.get(name, 0) + amount
        for name, amount in _limits(pod).items():
            if used.get(name, 0) + amount > self.capacity.get(name, 0):
                said = f"0/1 nodes are available: 1 Insufficient {name}. preemption: 0/1 nodes are available."
                unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}
                if pod["status"]["conditions"] != [unscheduled]:
                    pod["status"]["conditions"] = [unscheduled]
                    self.objects.event(pod, "Pod", "FailedScheduling", said)
                return False
        pod["spec"]["nodeName"] = "node-a"
        pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        return True

    def _start(self, pod: Object) -> None:
        container = pod["spec"]["containers"][0]
        image = container["image"]
        if image in self.missing_images:
            said = f'Back-off pulling image "{image}": ErrImagePull: failed to resolve reference: not found'
            self._wait(pod, "ImagePullBackOff", said)
            return
        try:
            variables = self._variables(pod, container)
        except KeyError as error:
            self._wait(pod, "CreateContainerConfigError", f"{error.args[0]} not found")
            return
        pod["status"] |= {"phase": "Running", "podIP": "127.0.0.1", "hostIP": "127.0.0.1", "startTime": now()}
        command = [*container.get("command", []), *container.get("args", [])]
        within, tmp = self._disk(pod)
        cache = f"{tmp}/triplane-cache"
        own = {"HOME": tmp, "TMPDIR": tmp, "TRIPLANE_CACHE": cache, "LANG": os.environ.get("LANG", "C.UTF-8")}
        path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{ROOT}/kernels"}
        with self.log(pod).open("wb") as log:
            try:
                self.processes[pod["metadata"]["uid"]] = subprocess.Popen(
                    [*within, *command],
                    env={**own, **path, **self.environment, **variables},
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                log.write(f"{command[0]}: {error.strerror}\n".encode())
                self._status(pod, {"terminated": _terminated(128, "StartError", str(error), now())})
                pod["status"]["phase"] = "Failed"
                return
        self._status(pod, {"running": {"startedAt": now()}})

    def _wait(self, pod: Object, reason: str, message: str) -> None:
        waiting = {"waiting": {"reason": reason, "message": message}}
        if pod["status"].get("containerStatuses", [{}])[0].get("state") != waiting:
            self._status(pod, waiting)
            self.objects.event(pod, "Pod", "Failed", message)

    def _ended(self, pod: Object, status: int) -> None:
        uid = pod["metadata"]["uid"]
        _signal(self.processes[uid], signal.SIGKILL)  # a container ends with its first process
        code = status if status >= 0 else 128 - status
        reason = self._marks.get(uid) or ("Error" if code else "Completed")
        words = ""
        if code and pod["spec"]["containers"][0].get("terminationMessagePolicy") == "FallbackToLogsOnError":
            words = "\n".join(self.log(pod).read_text(errors="replace").splitlines()[-80:])[-2048:]
        started = pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
        self._status(pod, {"terminated": _terminated(code, reason, words, started)})
        pod["status"]["phase"] = "Failed" if code else "Succeeded"

    def _status(self, pod: Object, state: dict[str, Any]) -> None:
        container = pod["spec"]["containers"][0]
        pod["status"]["containerStatuses"] = [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": container["image"],
                "ready": "running" in state,
                "started": "running" in state,
                "restartCount": 0,
                "state": state,
                "lastState": {},
            }
        ]
        self.objects.touch(pod)

    def _disk(self, pod: Object) -> tuple[list[str], str]:
        """The pod's disk: a command that runs another one with it, and its path there."""
        own = self.disk / pod["metadata"]["uid"]
        own.mkdir(parents=True, exist_ok=True)
        if not has_mounts():
            return [], str(own)
        script = 'mount --bind "$0" "$1" && shift && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, str(own), str(self.disk)], str(self.disk)

    def _variables(self, pod: Object, container: Object) -> dict[str, str]:
        found: dict[str, str] = {}
        namespace = pod["metadata"]["namespace"]
        for source in container.get("envFrom", []):
            for field, plural in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
                if field in source:
                    name = source[field]["name"]
                    kept = self.objects.every.get((namespace, plural, name))
                    if kept is None and not source[field].get("optional"):
                        raise KeyError(f'{plural[:-1]} "{name}"')
                    found |= {**(kept or {}).get("data", {}), **(kept or {}).get("stringData", {})}
        for each in container.get("env", []):
            value = each.get("value", "")
            path = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            found[each["name"]] = self._resolve(pod, value) if path is None else _field(pod, path)
        return found

    def _resolve(self, pod: Object, value: str) -> str:
        """A variable's value as it has to be without DNS and without mounts."""
        namespace = pod["metadata"]["namespace"]
        if value == "/tmp" or value.startswith("/tmp/"):
            return self._disk(pod)[1] + value[4:]
        if re.fullmatch(r"[a-z0-9-]+\.([a-z0-9-]+)", value):
            service = self.objects.every.get((namespace, "services", value.partition(".")[2]))
            jobs = self.objects.every.get((namespace, "jobs", value.partition(".")[2]))
            return "localhost" if service or jobs else value
        return value


@functools.cache
def has_mounts() -> bool:
    """Whether this process may make mount namespaces."""
    try:
        return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def _field(pod: Object, path: str) -> str:
    if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str(pod["metadata"].get(match[1], {}).get(match[2], ""))
    found: Any = pod
    for part in path.split("."):
        found = found.get(part, "")
    return str(found)


def _limits(pod: Object) -> dict[str, int]:
    """What a pod takes of countable resources."""
    found: dict[str, int] = {}
    for container in pod["spec"]["containers"]:
        for name, amount in container.get("resources", {}).get("limits", {}).items():
            if "/" in name:
                found[name] = found.get(name, 0) + int(amount)
    return found


def _terminated(code: int, reason: str, message: str, started: str) -> Object:
    words = {"message": message} if message else {}
    return {"exitCode": code, "reason": reason, "startedAt": started, "finishedAt": now(), **words}


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """SIGTERM goes to the container's first process, as from a kubelet; SIGKILL to all of its processes."""
    with suppress(ProcessLookupError, PermissionError):
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
