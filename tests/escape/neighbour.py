"""The sandbox beside the attacker's: it holds a secret, runs a process, serves a port, and must go on doing so."""

from __future__ import annotations

import asyncio
import secrets
import time

from envd.client import Limits, ToolCall
from envd.operations.client import ManagedSandbox, OperationsClient

_HEARTBEAT = r"""
import ctypes, socket, sys, threading, time
port, abstract, key = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
libc = ctypes.CDLL(None)
libc.shmget(key, 4096, 0o1666)
def serve(sock):
    sock.listen()
    while True:
        try:
            sock.accept()
        except OSError:
            continue
        open("visits", "a").write("somebody came\n")
tcp = socket.socket()
tcp.bind(("127.0.0.1", port))
unix = socket.socket(socket.AF_UNIX)
unix.bind("\0" + abstract)
for each in (tcp, unix):
    threading.Thread(target=serve, args=(each,), daemon=True).start()
n = 0
while True:
    n += 1
    with open("beat", "w") as file:
        file.write(str(n))
    time.sleep(0.1)
"""


class Neighbour:
    """A sandbox that nobody may touch."""

    port = 17_771

    def __init__(self, sandbox: ManagedSandbox, patience_s: float) -> None:
        self.sandbox = sandbox
        self.secret = secrets.token_hex(12)
        self.abstract = f"neighbour-{secrets.token_hex(6)}"
        self.shm_key = 0x5E000000 + secrets.randbelow(1 << 20)
        self._patience_s = patience_s

    @classmethod
    async def start(cls, client: OperationsClient, template: str, patience_s: float) -> Neighbour:
        """Create it and wait until its process beats."""
        limits = Limits(memory_mb=256, pids=64, cpu=1, disk_mb=32, lifetime_s=3600)
        self = cls(await client.create(template, limits=limits), patience_s)
        await self.sandbox.files.write("secret.txt", self.secret.encode())
        await self.sandbox.files.write("heartbeat.py", _HEARTBEAT.encode())
        arguments = ["python3", "heartbeat.py", str(self.port), self.abstract, str(self.shm_key)]
        self._heartbeat = (await self.sandbox.processes.start(arguments)).process
        deadline = time.monotonic() + patience_s
        while not await self.beats():
            assert time.monotonic() < deadline, "the neighbour's process does not start"
        return self

    async def look(self) -> float:
        """See that it answers in time, rightly, with its process running. Returns how long it took in seconds."""
        began = time.monotonic()
        async with asyncio.timeout(self._patience_s / 2):
            result = await self.sandbox.call(ToolCall("exec", {"command": "cat secret.txt; ls -A | tr '\\n' ' '"}))
        took = time.monotonic() - began
        expected = f"{self.secret}attempts.py beat calc.py heartbeat.py secret.txt tests \nexit 0"
        assert result.text.replace(".git ", "") == expected, f"the neighbour was changed: {result.text!r}"
        (process,) = [each for each in await self.sandbox.processes.list() if each.process == self._heartbeat]
        assert process.state == "running", f"the neighbour's process ended: {process}"
        return took

    async def beats(self) -> bool:
        """Whether its process goes on."""
        command = "cat beat 2>/dev/null; echo; sleep 0.15; cat beat 2>/dev/null"
        for _ in range(20):  # a machine may be busy for a while
            said = (await self.sandbox.call(ToolCall("exec", {"command": command}))).text
            first, second = said.split("\n")[:2]
            if first != second and first:
                return True
        return False

    async def visits(self) -> str:
        """Who connected to it."""
        result = await self.sandbox.call(ToolCall("exec", {"command": "cat visits"}))
        return result.text if result.ok else ""

    async def run(self, code: str) -> list[str]:
        """Lines that a Python program prints there."""
        process, out, err = await self.sandbox.processes.run(["python3", "-c", code])
        assert process.exit_code == 0, err.decode()
        return out.decode().splitlines()
