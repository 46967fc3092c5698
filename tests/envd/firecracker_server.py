"""Stands in for `firecracker` and `jailer` where there is no KVM: speaks Firecracker's API over its unix socket, and
checks what it is asked as Firecracker does (fields, order, states, what files there are and who may read them). Behind
the vsock's socket runs the real agent, taken out of the ramdisk it was given, on the files of the template disk it was
given. Memory files hold the guest's files, page by page; processes are not kept.

Run by the system's Python with its standard library only: `python firecracker_server.py firecracker|jailer ARGUMENTS`.
"""

from __future__ import annotations

import http.server
import io
import json
import os
import re
import shutil
import signal
import socket
import socketserver
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
from pathlib import Path
from typing import Any

PAGE = 4096
VERSION = os.environ.get("FAKE_FIRECRACKER_VERSION", "1.13.1")
ROOT = Path(os.environ.get("FAKE_JAIL_ROOT", "."))
LOG = os.environ.get("FAKE_FIRECRACKER_LOG", "")
"""Gets a line for each request."""
USER = int(os.environ.get("FAKE_JAIL_UID", os.geteuid()))
_LOAD_FLAG = (
    "track_dirty_pages" if tuple(int(each) for each in VERSION.split(".")[:2]) >= (1, 13) else "enable_diff_snapshots"
)
FIELDS: dict[str, tuple[dict[str, type], dict[str, type]]] = {
    "/machine-config": (
        {"vcpu_count": int, "mem_size_mib": int},
        {"smt": bool, "track_dirty_pages": bool, "cpu_template": str, "huge_pages": str},
    ),
    "/boot-source": ({"kernel_image_path": str}, {"initrd_path": str, "boot_args": str}),
    "/drives": (
        {"drive_id": str, "is_root_device": bool},
        {"path_on_host": str, "is_read_only": bool, "cache_type": str, "io_engine": str},
    ),
    "/vsock": ({"guest_cid": int, "uds_path": str}, {"vsock_id": str}),
    "/entropy": ({}, {"rate_limiter": dict}),
    "/actions": ({"action_type": str}, {}),
    "/vm": ({"state": str}, {}),
    "/snapshot/create": ({"snapshot_path": str, "mem_file_path": str}, {"snapshot_type": str}),
    "/snapshot/load": (
        {"snapshot_path": str},
        {"mem_backend": dict, "mem_file_path": str, "resume_vm": bool, _LOAD_FLAG: bool, "network_overrides": list},
    ),
}
"""Path -> required and optional fields, of src/firecracker/swagger/firecracker.yaml as far as envd uses it."""
BEFORE = ("/machine-config", "/boot-source", "/drives", "/vsock", "/entropy", "/snapshot/load")
AFTER = ("/vm", "/snapshot/create")


class Fault(Exception):
    """A request that Firecracker answers with 400."""


def inside(path: str) -> Path:
    """A path as the jailed Firecracker sees it."""
    return ROOT / path.lstrip("/")


def readable(path: str) -> Path:
    """A file that the jail's user may open. Raises Fault as a failing open does."""
    real = inside(path)
    try:
        about = real.stat()
    except OSError as error:
        raise Fault(f"No such file or directory (os error {error.errno}): {path}") from error
    if not (about.st_mode & stat.S_IROTH or about.st_uid == USER or USER == 0):
        raise Fault(f"Permission denied (os error 13): {path}")
    return real


def writable_directory(path: str) -> None:
    """Raise Fault where the jail's user can't make that file."""
    about = inside(path).parent.stat()
    if USER not in (0, about.st_uid) and not about.st_mode & stat.S_IWOTH:
        raise Fault(f"Permission denied (os error 13): {path}")


class Guest:
    """The agent of the ramdisk, on the template's files, stopped and continued as the machine is."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        ours, its = socket.socketpair()
        self.stream = ours
        (directory / "scratch").mkdir(mode=0o700, exist_ok=True)
        command = [
            directory / "envd-guest",
            "--fd",
            str(its.fileno()),
            "--escaped",
            "--workspace",
            directory / "workspace",
        ]
        self.agent = subprocess.Popen(
            [*command, "--scratch", directory / "scratch"],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        its.close()

    def signal(self, number: int) -> None:
        """To the agent and all that it started."""
        pids = [self.agent.pid]
        for pid in pids:
            try:
                pids += [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
                os.kill(pid, number)
            except (OSError, ValueError):
                continue

    def serve(self, connection: socket.socket) -> None:
        """Pass bytes between one vsock connection and the agent, until the connection ends."""

        def pass_on(source: socket.socket, target: socket.socket) -> None:
            try:
                while data := source.recv(65536):
                    target.sendall(data)
            except OSError:
                pass

        back = threading.Thread(target=pass_on, args=(self.stream, connection), daemon=True)
        back.start()
        pass_on(connection, self.stream)


class Machine:
    """What the API configures, starts, pauses and writes out."""

    def __init__(self, identity: str) -> None:
        self.identity, self.state = identity, "Not started"
        self.config: dict[str, Any] = {"/machine-config": {"vcpu_count": 1, "mem_size_mib": 128}, "drives": {}}
        self.touched = False
        self.tracked = False
        self.base = b""
        self.guest: Guest | None = None
        self.lock = threading.Lock()

    def request(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """Answer a request. Raises Fault."""
        if method == "GET" and path == "/":
            return {"app_name": "Firecracker", "id": self.identity, "state": self.state, "vmm_version": VERSION}
        kind = "/drives" if path.startswith("/drives/") else path
        if kind not in FIELDS or method != ("PATCH" if kind == "/vm" else "PUT"):
            raise Fault(f"Invalid request method and/or path: {method} {path}")
        check(kind, body)
        assert body is not None
        if kind in BEFORE and self.state != "Not started":
            raise Fault("The requested operation is not supported after starting the microVM.")
        if kind in AFTER and self.state == "Not started":
            raise Fault("The requested operation is not supported before starting the microVM.")
        with self.lock:
            {
                "/actions": self.start,
                "/vm": self.change,
                "/snapshot/create": self.write,
                "/snapshot/load": self.load,
            }.get(kind, lambda given: self.configure(kind, path, given))(body)
        return None

    def configure(self, kind: str, path: str, body: dict[str, Any]) -> None:
        self.touched = True
        if kind == "/machine-config" and not (1 <= body["vcpu_count"] <= 32 and body["mem_size_mib"] > 0):
            raise Fault("The vCPU number is invalid! or the memory size (MiB) is invalid.")
        if kind == "/boot-source":
            if readable(body["kernel_image_path"]).read_bytes()[:4] != b"\x7fELF":
                raise Fault("Kernel Loader: failed to load ELF kernel image")
            readable(body["initrd_path"])
        if kind == "/drives":
            if path != f"/drives/{body['drive_id']}":
                raise Fault("The id from the path does not match the id from the body!")
            readable(body["path_on_host"])
            if not body.get("is_read_only"):
                raise Fault("envd's drives are read-only")
            self.config["drives"][body["drive_id"]] = body
            return
        if kind == "/vsock":
            if body["guest_cid"] < 3:
                raise Fault("Invalid guest CID")
            self.listen(body["uds_path"])
        self.config[kind] = body

    def start(self, body: dict[str, Any]) -> None:
        if body["action_type"] != "InstanceStart":
            raise Fault(f"unknown variant `{body['action_type']}`")
        if self.state != "Not started":
            raise Fault("The requested operation is not supported after starting the microVM.")
        if "/boot-source" not in self.config:
            raise Fault("Cannot start microvm without kernel configuration.")
        arguments = self.config["/boot-source"]["boot_args"]
        if "pci=off" not in arguments or not re.search(r"envd\.stream=vsock:1024\b", arguments):
            raise Fault(f"this guest would not find its agent's port: {arguments}")
        directory = Path(tempfile.mkdtemp(prefix="guest-", dir=ROOT))
        (directory / "envd-guest").write_bytes(
            out_of_ramdisk(readable(self.config["/boot-source"]["initrd_path"]), "envd-guest")
        )
        (directory / "envd-guest").chmod(0o755)
        disk = readable(self.config["drives"]["template"]["path_on_host"])
        subprocess.run(
            ["unsquashfs", "-q", "-n", "-d", directory / "workspace", disk], check=True, stdout=subprocess.DEVNULL
        )
        self.state, self.guest = "Running", Guest(directory)

    def change(self, body: dict[str, Any]) -> None:
        assert self.guest is not None
        if body["state"] not in ("Paused", "Resumed"):
            raise Fault(f"unknown variant `{body['state']}`, expected `Paused` or `Resumed`")
        self.guest.signal(signal.SIGSTOP if body["state"] == "Paused" else signal.SIGCONT)
        self.state = "Paused" if body["state"] == "Paused" else "Running"

    def write(self, body: dict[str, Any]) -> None:
        if self.state != "Paused":
            raise Fault("Cannot save a microVM that is not paused: save/restore of microVM state failed")
        if body.get("snapshot_type") == "Diff" and not self.tracked:
            raise Fault("Diff snapshots are not allowed on uVMs with dirty page tracking disabled.")
        for key in ("snapshot_path", "mem_file_path"):
            writable_directory(body[key])
        memory = self.memory()
        known = self.base if body.get("snapshot_type") == "Diff" else b""
        with inside(body["mem_file_path"]).open("wb") as out:
            out.truncate(self.config["/machine-config"]["mem_size_mib"] << 20)
            for at in range(0, max(len(memory), len(known)), PAGE):
                page = memory[at : at + PAGE].ljust(PAGE, b"\0")
                if page != known[at : at + PAGE].ljust(PAGE, b"\0"):
                    out.seek(at)
                    out.write(page)
        if self.tracked:
            self.base = memory
        kept = {"magic": "firecracker", "version": VERSION, "config": self.config}
        inside(body["snapshot_path"]).write_text(json.dumps(kept))
        for key in ("snapshot_path", "mem_file_path"):
            os.chown(inside(body[key]), USER, USER) if os.geteuid() == 0 else None

    def load(self, body: dict[str, Any]) -> None:
        if self.touched:
            raise Fault("Loading a microVM snapshot not allowed after configuring boot-specific resources.")
        if ("mem_backend" in body) == ("mem_file_path" in body):
            raise Fault("too many fields: either `mem_backend` or `mem_file_path` exclusively is required")
        backend = body["mem_backend"]
        if set(backend) != {"backend_type", "backend_path"} or backend["backend_type"] not in ("File", "Uffd"):
            raise Fault(f"mem_backend: {backend}")
        try:
            kept = json.loads(readable(body["snapshot_path"]).read_text())
        except ValueError as error:
            raise Fault(f"Failed to get snapshot state from file: {error}") from error
        if kept.get("magic") != "firecracker" or kept["version"] != VERSION:
            raise Fault("Failed to get snapshot state from file: incompatible snapshot version")
        memory = readable(backend["backend_path"])
        if memory.stat().st_size != kept["config"]["/machine-config"]["mem_size_mib"] << 20:
            raise Fault("Failed to load guest memory: the memory file's size does not match the snapshot's")
        self.config = kept["config"]
        for drive in self.config["drives"].values():
            readable(drive["path_on_host"])
        self.listen(self.config["/vsock"]["uds_path"])
        with memory.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            content = file.read(size)
        directory = Path(tempfile.mkdtemp(prefix="guest-", dir=ROOT))
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
            archive.extractall(directory)
        self.tracked = bool(body.get(_LOAD_FLAG))
        self.base = size.to_bytes(8, "little") + content
        self.state, self.guest = "Paused", Guest(directory)
        self.change({"state": "Resumed" if body.get("resume_vm") else "Paused"})

    def memory(self) -> bytes:
        """The guest's files as its memory's content: a length, then an archive."""
        assert self.guest is not None
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for name in ("envd-guest", "workspace"):
                archive.add(self.guest.directory / name, name)
        return len(out.getvalue()).to_bytes(8, "little") + out.getvalue()

    def listen(self, path: str) -> None:
        """The vsock's end on the host: `CONNECT PORT` is answered `OK`, unless nobody listens there."""
        writable_directory(path)
        listener = socket.socket(socket.AF_UNIX)
        try:
            bind_below(listener, inside(path))
        except OSError as error:
            raise Fault(f"Error binding to the host-side Unix socket: {error}") from error
        listener.listen(8)

        def accept() -> None:
            while True:
                connection, _ = listener.accept()
                said = b""
                while not said.endswith(b"\n") and (byte := connection.recv(1)):
                    said += byte
                if said == b"CONNECT 1024\n" and self.guest is not None:
                    connection.sendall(b"OK 1073741824\n")
                    self.guest.serve(connection)
                connection.close()

        threading.Thread(target=accept, daemon=True).start()


def check(kind: str, body: dict[str, Any] | None) -> None:
    """Fields as Firecracker's own types take them: none missing, none unknown, each of its type. Raises Fault."""
    required, optional = FIELDS[kind]
    if not isinstance(body, dict):
        raise Fault("Empty PUT request.")
    for name, value in body.items():
        wanted = required.get(name) or optional.get(name)
        if wanted is None:
            known = ", ".join(f"`{each}`" for each in (*required, *optional))
            raise Fault(
                f"An error occurred when deserializing the json body of a request: unknown field `{name}`, expected one"
                f" of {known}."
            )
        if type(value) is not wanted:
            raise Fault(f"An error occurred when deserializing the json body of a request: invalid type for `{name}`.")
    for name in required:
        if name not in body:
            raise Fault(f"An error occurred when deserializing the json body of a request: missing field `{name}`.")


def out_of_ramdisk(path: Path, wanted: str) -> bytes:
    """The last file of that name in concatenated newc archives, as the kernel unpacks them."""
    whole, at, found = path.read_bytes(), 0, b""
    while at + 110 <= len(whole):
        if whole[at : at + 6] != b"070701":
            at += 1
            continue
        size, name_size = int(whole[at + 54 : at + 62], 16), int(whole[at + 94 : at + 102], 16)
        name = whole[at + 110 : at + 109 + name_size].decode()
        data = (at + 110 + name_size + 3) // 4 * 4
        if name == wanted:
            found = whole[data : data + size]
        at = (data + size + 3) // 4 * 4
    if not found:
        raise Fault(f"the ramdisk has no {wanted}")
    return found


def bind_below(listener: socket.socket, path: Path) -> None:
    """Bind a socket by a path of any length."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection to the API."""

    protocol_version = "HTTP/1.1"
    machine: Machine

    def handle_request(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body: Any = None
        try:
            body = json.loads(self.rfile.read(size)) if size else None
            answer, code = self.machine.request(self.command, self.path, body), 200
        except (Fault, ValueError) as error:
            answer, code = {"fault_message": str(error)}, 400
        if LOG:
            with Path(LOG).open("a") as log:
                said = {
                    "id": self.machine.identity,
                    "method": self.command,
                    "path": self.path,
                    "body": body,
                    "answer": answer,
                }
                log.write(json.dumps(said) + "\n")
        data = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(204 if answer is None else code)
        self.send_header("Content-Length", str(len(data))) if data else None
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_PATCH = handle_request

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *values: object) -> None:
        """Quiet."""


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """The API's socket."""

    daemon_threads = True

    def server_bind(self) -> None:
        bind_below(self.socket, inside(str(self.server_address)))


def firecracker(arguments: list[str]) -> None:
    """`firecracker --api-sock PATH --id ID`."""
    if arguments == ["--version"]:
        print(f"Firecracker v{VERSION}\n")
        return
    given: dict[str, str] = {}
    for word in arguments:  # the jailer writes --id=ID, users --id ID
        if word.startswith("--"):
            key, _, value = word.partition("=")
            given[key] = value
        else:
            given[list(given)[-1]] = word
    if set(given) - {"--api-sock", "--id", "--start-time-us", "--start-time-cpu-us"}:
        sys.exit(f"Arguments parsing error: Found argument '{set(given)}' which wasn't expected")
    Handler.machine = Machine(given["--id"])
    writable_directory(given["--api-sock"])
    with Server(given["--api-sock"], Handler) as server:
        server.serve_forever()


def jailer(arguments: list[str]) -> None:
    """Checks its arguments and prepares the jail as the jailer does, but can't enter it: the stand-in's interpreter is
    outside.
    """
    split = arguments.index("--")
    own, rest = arguments[:split], arguments[split + 1 :]
    given = dict(zip(own[::2], own[1::2], strict=True))
    known = {
        "--id",
        "--exec-file",
        "--uid",
        "--gid",
        "--chroot-base-dir",
        "--resource-limit",
        "--cgroup-version",
        "--cgroup",
        "--parent-cgroup",
    }
    if set(given) - known or not {"--id", "--exec-file", "--uid", "--gid"} <= set(given):
        sys.exit(f"Arguments parsing error: {own}")
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", given["--id"]):
        sys.exit(f"Jailer error: Invalid instance ID: {given['--id']}")
    program = Path(given["--exec-file"])
    if "firecracker" not in program.name or not program.is_file():
        sys.exit("Jailer error: the exec file's name must contain firecracker")
    root = Path(given.get("--chroot-base-dir", "/srv/jailer"), program.name, given["--id"], "root")
    root.mkdir(parents=True, exist_ok=True)
    shutil.copy(program, root / program.name)
    os.chown(root, int(given["--uid"]), int(given["--gid"]))
    env = {
        "FAKE_JAIL_ROOT": str(root),
        "FAKE_JAIL_UID": given["--uid"],
        "FAKE_FIRECRACKER_VERSION": VERSION,
        "FAKE_FIRECRACKER_LOG": LOG,
        "PATH": os.defpath,
    }
    os.execve(
        program, [str(program), f"--id={given['--id']}", "--start-time-us=1", "--start-time-cpu-us=1", *rest], env
    )


if __name__ == "__main__":
    {"firecracker": firecracker, "jailer": jailer}[sys.argv[1]](sys.argv[2:])
