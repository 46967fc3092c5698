"""Sandboxes as Kubernetes pods: one pod per sandbox; the server reaches the agent through the API server's `exec`.

Reasons for exec instead of a port of the pod: server and pods need no network between them, so that pods can have none
at all; pods hold no credential; and the API server authorizes access. The cost: all data passes the API server, and a
broken connection ends its sandbox. The RuntimeClass determines the isolation: gVisor's has its own kernel, Kata's is a
virtual machine, and without one pods share the host's kernel.

    TRIPLANE_ENVD_PODS_IMAGE           an image with envd-guest in /usr/local/bin (docs/sandboxes-vm.md)
    TRIPLANE_ENVD_PODS_RUNTIME_CLASS   the RuntimeClass; unset: the cluster's default
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from contracts.owned import is_abandoned, owned_name
from envd.backends.base import BoxSpec, Features, IsolationLevel, Usage
from envd.backends.pods.api import Api, ApiError, ExecStream, connect
from envd.backends.pods.manifest import CONTAINER, SERVER, START_S, network_policy, pod_manifest
from envd.backends.probing import probe
from envd.backends.vm.machine import GUEST_PATH
from envd.backends.workspace_tar import NAME, load_packages, load_workspace, save_workspace
from envd.errors import BackendUnavailable, EnvdError, SandboxGone, SandboxStartError
from envd.guest.link import GuestLink
from envd.sandbox.place import sandbox_environment

_GUEST = ["/usr/local/bin/envd-guest", "--stdio", "--workspace", "/workspace", "--scratch", "/tmp/.envd"]
_PROBE_S = 180.0
_NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName")
_LEVELS = (("runsc", IsolationLevel.KERNEL), ("gvisor", IsolationLevel.KERNEL), ("kata", IsolationLevel.MACHINE))


class PodBox:
    """A running pod with an agent in it."""

    def __init__(self, backend: PodsBackend, spec: BoxSpec, pod: str, stream: ExecStream, guest: GuestLink) -> None:
        self._backend, self._spec, self._stream, self._guest = backend, spec, stream, guest
        self.pod = pod
        self._ending: asyncio.Task[None] | None = None

    @property
    def guest(self) -> GuestLink:
        """Connection to the sandbox's agent."""
        return self._guest

    async def pause(self) -> None:
        """Raise EnvdError: Kubernetes can't pause pods."""
        raise EnvdError("the pods backend can't pause sandboxes: Kubernetes has no such operation")

    async def resume(self) -> None:
        """Raise EnvdError: Kubernetes can't pause pods."""
        raise EnvdError("the pods backend's sandboxes are never paused")

    async def snapshot(self, into: Path) -> tuple[str, ...]:
        """Write the workspace's files. Processes, memory and /tmp are not kept."""
        return await save_workspace(self._guest, into, self._spec.limits.disk_mb)

    async def usage(self) -> Usage:
        """Return zeros: only the cluster's metrics have the usage. Raises SandboxGone."""
        if self._guest.gone is not None:
            raise SandboxGone(self._guest.gone)
        return Usage()

    async def destroy(self) -> None:
        """Delete the pod. Idempotent; continues if the caller is cancelled."""
        if self._ending is None:
            self._guest.close()
            self._ending = asyncio.create_task(self._backend.end(self, self._stream))
        await asyncio.shield(self._ending)


class PodsBackend:
    """Runs sandboxes as pods."""

    name = "pods"

    def __init__(
        self,
        run_dir: Path,
        api: Api,
        image: str,
        runtime_class: str | None,
        level: IsolationLevel,
        packages: str | None = None,
    ) -> None:
        """packages: directory of the image where a runtime's packages are mounted; None: no runtimes."""
        self._api, self._image, self._runtime_class, self._level = api, image, runtime_class, level
        self._packages = packages
        self._tars = run_dir / "pods"
        self._label = owned_name()
        self._boxes: set[PodBox] = set()
        self._packed: dict[str, asyncio.Task[Path]] = {}
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def features(self) -> Features:
        """Features of this backend on this cluster."""
        can = frozenset({"snapshot", "fork", "migrate", "pty", *(["runtime"] if self._packages else [])})
        helper = f"kubernetes, runtime class {self._runtime_class or 'default'}"
        return Features(self._level, ("cpu", "disk", "memory"), False, can, helper)

    async def prepare(self) -> None:
        """Create the network policy, and remove the pods of this machine's killed servers."""
        self._tars.mkdir(mode=0o700)
        try:
            await self._api.ask(self._api.networking.create_namespaced_network_policy, network_policy())
        except ApiError as error:
            if error.status != 409:  # another server has created the policy
                raise
        listed = await self._api.ask(self._api.core.list_namespaced_pod, label_selector=SERVER)
        for pod in listed.items:
            if is_abandoned(pod.metadata.labels.get(SERVER, "")):
                await self._delete(pod.metadata.name)

    async def create(self, spec: BoxSpec) -> PodBox:
        """Start a pod and fill its workspace with the template."""
        return await self._start(spec, await self._tar(spec.template, spec.template_dir))

    async def restore(self, snapshot: Path, spec: BoxSpec) -> PodBox:
        """Start a pod with a snapshot's files."""
        return await self._start(spec, snapshot)

    async def forget(self, digest: str) -> None:
        """See `Forgets`."""
        packed = self._packed.pop(digest, None)
        if packed is not None:
            await asyncio.wait([packed])
            await asyncio.to_thread(shutil.rmtree, self._tars / digest[:32], True)

    async def died(self) -> str:
        """Wait until `stop` cancels: the backend has no process of its own that could fail."""
        return await self._failed

    async def stop(self) -> None:
        """Delete all that this server created except the network policy, which other servers' pods may need."""
        self._failed.cancel()
        await asyncio.gather(*(box.destroy() for box in list(self._boxes)), return_exceptions=True)
        with suppress(EnvdError):
            delete = self._api.core.delete_collection_namespaced_pod
            await self._api.ask(delete, label_selector=f"{SERVER}={self._label}", grace_period_seconds=0)
        await self._api.close()
        for path in self._tars.rglob("*.tar"):
            path.unlink(missing_ok=True)

    async def end(self, box: PodBox, stream: ExecStream) -> None:
        """Delete a box's pod."""
        self._boxes.discard(box)
        await stream.close()
        await self._delete(box.pod)

    async def _start(self, spec: BoxSpec, files: Path) -> PodBox:
        if spec.network or spec.read_only:
            raise SandboxStartError(
                "the pods backend supports neither network nor read-only workspaces: change the rules, or choose"
                " another backend"
            )
        pod = f"envd-{re.sub(r'[^a-z0-9-]', '-', spec.name.lower())[:40]}-{os.urandom(5).hex()}"
        stream: ExecStream | None = None
        try:
            packages = None if spec.runtime is None else await self._tar(spec.runtime.digest, spec.runtime.directory)
            manifest = pod_manifest(
                pod,
                spec,
                image=self._image,
                runtime_class=self._runtime_class,
                server=self._label,
                packages=None if packages is None else (str(self._packages), (packages / NAME).stat().st_size),
            )
            until = asyncio.get_running_loop().time() + START_S
            await self._create(manifest)
            await self._running(pod, until)
            async with asyncio.timeout_at(until):
                stream = await self._api.exec(pod, CONTAINER, _GUEST)
                guest = await GuestLink.over_socket(stream.sock)
                env = {**sandbox_environment("/tmp"), "PATH": GUEST_PATH, **spec.env}
                await guest.init(host_name=spec.host_name, env=env)
                await load_workspace(guest, files)
                if packages is not None:
                    await load_packages(guest, packages, str(self._packages))
        except BaseException as error:
            said = stream.said if stream is not None else ""
            if stream is not None:
                await stream.close()
            try:
                await self._delete(pod)
            except ApiError as left:
                said = f"{said}; {left}: its deadline ends it"
            if isinstance(error, (EnvdError, OSError, TimeoutError)):
                why = str(error) or f"its agent did not answer within {START_S:g} s"
                raise SandboxStartError(f"pod {pod} did not become a sandbox: {why} {said}".rstrip()) from error
            raise
        box = PodBox(self, spec, pod, stream, guest)
        self._boxes.add(box)
        return box

    async def _create(self, manifest: dict[str, Any]) -> None:
        """Create a pod. Its name is random: a pod of that name is this one, by a request whose reply was lost."""
        try:
            await self._api.ask(self._api.core.create_namespaced_pod, manifest)
        except ApiError as error:
            if error.status != 409:
                raise

    async def _running(self, pod: str, until: float) -> None:
        """Wait until the pod's container runs. Raises SandboxStartError if it can't start, or not by this time of the
        loop.
        """
        pause = 0.05
        while True:
            status = (await self._api.ask(self._api.core.read_namespaced_pod, name=pod)).status
            state = status.container_statuses[0].state if status.container_statuses else None
            if status.phase == "Running" and state and state.running:
                return
            waiting = state.waiting if state else None
            reason = waiting.reason if waiting else status.reason
            if status.phase in ("Failed", "Succeeded") or reason in _NO_IMAGE:
                raise SandboxStartError(f"{reason or status.phase}: {waiting.message if waiting else status.message}")
            if asyncio.get_running_loop().time() > until:
                lacking = [each for each in status.conditions or [] if each.type == "PodScheduled" and each.message]
                why = waiting or next(iter(lacking), None)
                said = f"{why.reason}: {why.message}" if why else f"its phase is {status.phase}"
                raise SandboxStartError(f"it does not run after {START_S:g} s ({said}): see `kubectl describe pod`")
            await asyncio.sleep(pause)
            pause = min(1.0, pause * 1.5)

    async def _delete(self, pod: str) -> None:
        try:
            await self._api.ask(self._api.core.delete_namespaced_pod, name=pod, grace_period_seconds=0)
        except ApiError as error:
            if error.status not in (0, 404):  # 0: API server unreachable; activeDeadlineSeconds ends the pod
                raise

    async def _tar(self, digest: str, files: Path) -> Path:
        """Directory with the tar of a template or a runtime, made once."""
        packed = self._packed.get(digest)
        if packed is None or (packed.done() and (packed.cancelled() or packed.exception())):
            packed = self._packed[digest] = asyncio.create_task(asyncio.to_thread(self._pack, digest, files))
        return await asyncio.shield(packed)

    def _pack(self, digest: str, files: Path) -> Path:
        directory = self._tars / digest[:32]
        directory.mkdir(exist_ok=True)
        draft = directory / ".draft"
        with tarfile.open(draft, "w", format=tarfile.PAX_FORMAT) as archive:
            archive.add(files, ".", filter=_as_root)
        draft.rename(directory / NAME)
        return directory


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


async def _level_of(api: Api, runtime_class: str | None) -> IsolationLevel:
    if runtime_class is None:
        return IsolationLevel.PROCESS
    try:
        found = await api.ask(api.node.read_runtime_class, name=runtime_class)
    except ApiError as error:
        raise BackendUnavailable(
            f"the cluster has no RuntimeClass {runtime_class!r} that envd may read: {error}"
        ) from error
    return next((level for name, level in _LEVELS if found.handler.startswith(name)), IsolationLevel.PROCESS)


def _packages_of(environment: Mapping[str, str]) -> str | None:
    """Directory for runtimes' packages. Raises BackendUnavailable for a path that is not absolute."""
    found = environment.get("TRIPLANE_ENVD_PODS_PACKAGES") or None
    if found is not None and not found.startswith("/"):
        raise BackendUnavailable(
            f"TRIPLANE_ENVD_PODS_PACKAGES={found!r}: name the directory of the image's Python packages, such as"
            " /usr/local/lib/python3.11/site-packages"
        )
    return found


async def start(run_dir: Path) -> PodsBackend:
    """Start the backend and test it by starting a sandbox. Raises BackendUnavailable with the fix."""
    image = os.environ.get("TRIPLANE_ENVD_PODS_IMAGE")
    if not image:
        raise BackendUnavailable(
            "set TRIPLANE_ENVD_PODS_IMAGE to an image with envd-guest in /usr/local/bin: see docs/sandboxes-vm.md"
        )
    runtime_class = os.environ.get("TRIPLANE_ENVD_PODS_RUNTIME_CLASS") or None
    api = await connect()
    try:
        level = await _level_of(api, runtime_class)
        backend = PodsBackend(run_dir, api, image, runtime_class, level, _packages_of(os.environ))
    except BaseException:
        await api.close()
        raise
    try:
        await backend.prepare()
        await probe(backend.create, run_dir, f"Kubernetes at {api.url}", _PROBE_S)
    except EnvdError as error:
        await backend.stop()
        raise BackendUnavailable(str(error)) from error
    except BaseException:
        await backend.stop()
        raise
    return backend
