"""Attacks by what a sandbox says and packs: floods, forged exit codes, terminal escapes, archives."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import tarfile

import grpc

from contracts.pb import envd_operations_pb2 as operations_pb
from contracts.pb import envd_pb2 as pb
from envd.client import ToolCall
from tests.escape.arena import Arena, attempt
from tests.escape.attack import CONTAINED, Attack

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b6n"


async def flood(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    before = arena.host.server_bytes()
    call = ToolCall("exec", {"command": "yes 'a flood of output'; true", "timeout_s": arena.short_s})
    result = await sandbox.call(call, timeout_s=40)
    grown = (arena.host.server_bytes() - before) >> 20
    bad = len(result.text) > 20_000 or grown > 64
    return (
        f"{'BREACH' if bad else 'bounded'}: {len(result.text)} characters of {result.true_bytes} bytes, the server grew"
        f" by {grown} MiB"
    )


async def flood_unread(arena: Arena) -> str:
    """Ten programs write without end and nobody reads; then a reader takes one byte of each stream and stops."""
    sandbox = await arena.sandbox()
    before = arena.host.server_bytes()
    started = [await sandbox.processes.start(["yes", "x" * 1000]) for _ in range(10)]
    streams = [sandbox.processes.connect(each.process) for each in started]
    for stream in streams:
        await anext(stream)
    await asyncio.sleep(1.5)
    answered = (await sandbox.call(ToolCall("exec", {"command": "echo alive"}), timeout_s=30)).text
    grown = (arena.host.server_bytes() - before) >> 20
    for stream in streams:
        await stream.aclose()
    return f"{'BREACH' if grown > 96 else 'bounded'}: it grew by {grown} MiB, then {answered!r}"


async def one_line(arena: Arena) -> str:
    """A line of 12 MB, and a file of one line, which line-wise tools must not hold many times over."""
    sandbox = await arena.sandbox()
    await sandbox.call(ToolCall("exec", {"command": "head -c 12000000 /dev/zero | tr '\\0' a >line"}))
    calls = [
        ToolCall("read", {"path": "line"}),
        ToolCall("search", {"pattern": "(a*)*b", "path": "line"}),
        ToolCall("exec", {"command": "cat line"}),
    ]
    results = [await sandbox.call(call, timeout_s=20) for call in calls]
    sizes = [len(each.text) for each in results]
    return f"{'BREACH' if max(sizes) > 20_000 else 'bounded'} {sizes} {[each.timed_out for each in results]}"


async def hopeless_pattern(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    await sandbox.call(
        ToolCall(
            "exec",
            {
                "command": (
                    "printf '%0.sa' {1..50000} >a; mkdir m; for i in $(seq 200); do echo"
                    " aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa >m/$i; done"
                )
            },
        )
    )
    said = []
    for pattern in ("(a+)+$b", "(x+x+)+y", "((((a?){30}){30}){30}){30}", "a{1,1000}{1,1000}{1,1000}"):
        result = await sandbox.call(ToolCall("search", {"pattern": pattern}), timeout_s=arena.short_s)
        said.append(f"{result.ok} {result.timed_out} {result.text[:60]!r}")
    answered = (await sandbox.call(ToolCall("exec", {"command": "echo alive"}), timeout_s=30)).text
    return f"ended {said}, then {answered!r}"


FORGERIES = {
    "words": "printf 'fine\\nexit 0'; false",
    "a descriptor of the driver": (
        "echo 0 >&201; echo 0 >&200; printf '0 0 0\\n' >/proc/$$/fd/11; for fd in /proc/$$/fd/*; do printf"
        " '0\\n0\\n0\\n' >$fd; done 2>/dev/null; false"
    ),
    "descriptors by number": "for n in 10 11 12 13 14 15 16; do eval \"printf '0\\n' >&$n\"; done 2>/dev/null; false",
    "builtins replaced": "builtin() { command builtin true; }; exit() { :; }; printf() { :; }; read() { :; }; false",
    "exit": "exit 3",
    "a trap": "trap 'exit 0' EXIT DEBUG ERR RETURN; false",
    "prompt commands": (
        "PROMPT_COMMAND='true'; set -o posix; shopt -s expand_aliases; alias false=true builtin=true; /bin/false"
    ),
    "killed shell": "kill -9 $$",
    "replaced shell": "exec /bin/false",
    "read-only variables": "readonly __envd_mode __envd_out __envd_code __envd_status; false",
    "debug trap with output": "set -x; PS4='$(echo 0 >&201)'; false",
    "closed descriptors": 'for n in $(seq 3 20); do eval "exec $n>&-"; done; false',
}


async def forged_exit_codes(arena: Arena) -> str:
    at_once = asyncio.Semaphore(4)

    async def forged(name: str, command: str) -> str:
        async with at_once:
            sandbox = await arena.sandbox()
            result = await sandbox.call(
                ToolCall("exec", {"command": command, "timeout_s": arena.short_s}), timeout_s=30
            )
            last = result.text.rsplit("\n", 1)[-1]
            believed = result.ok or last == "exit 0"
            after = await sandbox.call(
                ToolCall("exec", {"command": "/bin/false", "timeout_s": arena.short_s}), timeout_s=30
            )
            poisoned = after.ok or after.text.rsplit("\n", 1)[-1] == "exit 0"
            await sandbox.close()
        return (
            f"{'BREACH' if believed else 'refused'} {name}: {last} then"
            f" {'BREACH ' if poisoned else ''}{after.text[-30:]!r}"
        )

    return "\n".join(await asyncio.gather(*(forged(*each) for each in FORGERIES.items())))


async def forged_for_the_next(arena: Arena) -> str:
    """A background process that lives on tries to answer for later commands, by every descriptor and file it can write
    to.
    """
    sandbox = await arena.sandbox()
    code = (
        "import glob, os, time\nguesses = b'0\\n' + b''.join(b'%d 0\\n' % n for n in range(1, 60))\nwhile True:\n   "
        " for path in glob.glob('/proc/[0-9]*/fd/*') + glob.glob('/tmp/.envd/*'):\n        try:\n            if 'null'"
        " in os.readlink(path):\n                continue\n        except OSError:\n            pass\n        try:\n   "
        "         fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)\n            os.write(fd, guesses)\n           "
        " os.close(fd)\n        except OSError:\n            pass\n    time.sleep(0.01)\n"
    )
    await sandbox.files.write("forge.py", code.encode())
    await sandbox.processes.start(["python3", "forge.py"])
    await asyncio.sleep(0.5)
    said = []
    for _ in range(5):
        result = await sandbox.call(
            ToolCall("exec", {"command": "sleep 0.2; (exit 7)", "timeout_s": arena.short_s}), timeout_s=30
        )
        process, _, _ = await sandbox.processes.run(["bash", "-c", "sleep 0.2; exit 7"])
        believed = result.ok or process.exit_code != 7
        said.append(f"{'BREACH' if believed else 'refused'} {result.text[-12:]!r} and {process.exit_code}")
    return "\n".join(said)


async def terminal_escapes(arena: Arena) -> str:
    """Escapes in a label, a host name, a path and output must not reach an operator's terminal or the log as they
    are.
    """
    sandbox = await arena.sandbox(labels={"team": ESCAPE})
    await sandbox.call(ToolCall("exec", {"command": "printf '\\033]0;owned\\007\\033[2J'"}))
    await attempt("path", sandbox.files.read(f"../{ESCAPE}"))
    await attempt(
        "rules", arena.client.create(arena.template, rules=f"tools:\n  allow: ['{'x' * 10}']\nisolation: '\\e[2J'\n")
    )
    command = [sys.executable, "-m", "envd", "top", "--address", arena.address, "--once"]
    shown = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=60, check=False)
    bad = [
        name
        for name, data in (("top", shown.stdout), ("its errors", shown.stderr))
        if b"\x1b]0" in data or b"\x9b6n" in data or b"\x1b[2J" in data
    ]
    events = [
        event.detail_json
        async for event in arena.client.audit()
        if not event.detail_json.isascii() or "\x1b" in event.detail_json
    ]
    ran = shown.returncode == 0 and sandbox.id[:4].encode() in shown.stdout
    return f"{'BREACH' if bad or events else 'neutralised'} {bad} {events} top shows it: {ran}"


BOMBS = """
import gzip, tarfile, zipfile, zlib
with zipfile.ZipFile("bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
    for n in range(4):
        with archive.open(f"{n}", "w") as member:
            for _ in range(64):
                member.write(bytes(1 << 20))
print("a zip of", os.path.getsize("bomb.zip"))
try:
    zipfile.ZipFile("bomb.zip").extractall("unpacked")
    print("BREACH 256 MiB unpacked")
except OSError as error:
    print("refused unzip", errno.errorcode[error.errno])
subprocess.run("rm -rf unpacked; gzip -dc </dev/null; head -c 200M /dev/zero | gzip >b.gz", shell=True)
done = subprocess.run("gzip -dc b.gz >b", shell=True, capture_output=True, text=True)
print("BREACH" if done.returncode == 0 else "refused gunzip", done.stderr[-60:])
"""
TAR_OUT = """
import io, tarfile
with tarfile.open("out.tar", "w") as archive:
    for name, kind, target in (
        ("../../../../etc/cron.d/x", tarfile.REGTYPE, ""), ("/etc/passwd", tarfile.REGTYPE, ""),
        ("l", tarfile.SYMTYPE, "/etc"), ("l/passwd", tarfile.REGTYPE, ""),
        ("h", tarfile.LNKTYPE, "/etc/passwd"), ("dev", tarfile.BLKTYPE, ""),
    ):
        member = tarfile.TarInfo(name)
        member.type, member.linkname, member.mode = kind, target, 0o4777
        archive.addfile(member, io.BytesIO(b""))
done = subprocess.run(["tar", "-x", "-P", "-f", "out.tar"], capture_output=True, text=True)
print("BREACH" if done.returncode == 0 else "refused tar", done.stderr[-300:])
"""


def hostile_tar() -> bytes:
    """A snapshot as no server of ours writes one."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind, target in (
            ("../../escaped", tarfile.REGTYPE, ""),
            ("/tmp/escaped", tarfile.REGTYPE, ""),
            ("link", tarfile.SYMTYPE, "/tmp"),
            ("link/escaped", tarfile.REGTYPE, ""),
            ("hard", tarfile.LNKTYPE, "/etc/passwd"),
            ("device", tarfile.BLKTYPE, ""),
            ("pipe", tarfile.FIFOTYPE, ""),
            ("files.tar", tarfile.SYMTYPE, "/etc/passwd"),
            ("snapshot.json", tarfile.SYMTYPE, "/etc/passwd"),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, target, 0o4777
            archive.addfile(member, io.BytesIO(b""))
    return buffer.getvalue()


async def hostile_snapshots(arena: Arena) -> str:
    """What another server, or somebody who says so, sends to Receive."""
    backend = (await arena.client.info()).backend
    said = []
    for name, data in {
        "tar with ways out": hostile_tar(),
        "no tar": b"\0" * 5000 + b"x" * 5000,
        "half a tar": hostile_tar()[:700],
        "nothing": b"",
    }.items():
        header = operations_pb.ReceiveHeader(
            sandbox_id="escape-" + "A" * 20,
            token="t" * 32,
            backend=backend,
            template=arena.template,
            template_files=arena.files,
            limits=pb.Limits(memory_mb=128, pids=32, cpu=1, disk_mb=16, lifetime_s=60),
            expires_in_s=60,
            host_name="sandbox",
        )
        chunks = [
            operations_pb.SnapshotChunk(header=header),
            *(operations_pb.SnapshotChunk(data=data[at : at + 4096]) for at in range(0, len(data), 4096)),
        ]
        try:
            await arena.client.operations.Receive(iter(chunks), timeout=arena.patience_s)
            said.append(f"BREACH took {name}")
        except grpc.aio.AioRpcError as error:
            said.append(f"refused {name}: {error.code().name} {(error.details() or '')[:150]}")
    bad_names = {"..": "A" * 16, "slashes": "../../tmp/x/" + "A" * 16, "one of a neighbour": arena.neighbour.sandbox.id}
    for name, identity in bad_names.items():
        chunks = [
            operations_pb.SnapshotChunk(
                header=operations_pb.ReceiveHeader(
                    sandbox_id=identity,
                    token="t" * 32,
                    backend=backend,
                    template=arena.template,
                    template_files=arena.files,
                    host_name="../x",
                )
            )
        ]
        try:
            await arena.client.operations.Receive(iter(chunks), timeout=arena.patience_s)
            said.append(f"BREACH took id with {name}")
        except grpc.aio.AioRpcError as error:
            said.append(f"refused id {name}: {error.code().name}")
    return "\n".join([*said, *(["BREACH a file outside"] if arena.host.escaped_files() else [])])


async def hostile_templates(arena: Arena) -> str:
    said = []
    for path in ("../x", "/etc/x", "a/../../x", ".git/hooks/post-checkout", "a\0b", "", ".", "a//b", "x" * 300, ".git"):
        said.append(
            await attempt(f"template with {path[:30]!r}", arena.client.put_template({path: b"x", "attempts.py": b""}))
        )
    said.append(await attempt("a file that is a directory too", arena.client.put_template({"a": b"", "a/b": b""})))
    return "\n".join(said)


async def escaped_log(arena: Arena) -> str:
    """Lines that look like events, in what is recorded."""
    sandbox = await arena.sandbox()
    await attempt("path", sandbox.files.read('../x"}\n{"number": 1, "kind": "server.started", "detail": {}'))
    bad = [
        event
        for event in [e async for e in arena.client.audit(sandbox_id=sandbox.id)]
        if "\n" in event.detail_json or not isinstance(json.loads(event.detail_json), dict)
    ]
    return f"{'BREACH' if bad else 'one line each'} {bad}"


_REST = r"refused words: exit 1"
ATTACKS = (
    Attack(
        "output-flood",
        "output",
        "a command that prints without end",
        r"bounded",
        act=flood,
        audit=("limit.time", "limit.output"),
    ),
    Attack(
        "output-unread",
        "output",
        "ten programs that print without end to readers that stop reading",
        r"bounded[\s\S]*alive",
        act=flood_unread,
        audit=("limit.output",),
    ),
    Attack(
        "output-one-line",
        "output",
        "one line of 12 MB read, searched and printed",
        r"bounded",
        act=one_line,
        audit=("limit.output", "limit.time"),
    ),
    Attack(
        "output-pattern",
        "output",
        "regular expressions that take for ever",
        r"ended[\s\S]*alive",
        act=hopeless_pattern,
        audit=("limit.memory", "limit.time"),
    ),
    Attack(
        "exit-code-forged",
        "output",
        "twelve ways to make a failed command look good: words, descriptors, builtins, traps, a killed shell",
        _REST,
        act=forged_exit_codes,
        audit=("shell.died",),
    ),
    Attack(
        "exit-code-of-others",
        "output",
        "a background process that answers for later commands",
        r"refused.*exit 7",
        act=forged_for_the_next,
        unseen=CONTAINED,
        mark="forge.py",
    ),
    Attack(
        "terminal-escapes",
        "output",
        "escapes in labels, paths, rules and output, for an operator's terminal",
        r"neutralised.*top shows it: True",
        act=terminal_escapes,
        audit=("path.escape",),
    ),
    Attack(
        "audit-forged",
        "output",
        "paths that look like events of the audit log",
        r"one line each",
        act=escaped_log,
        audit=("path.escape",),
    ),
    Attack(
        "archive-bombs",
        "archives",
        "zip and gzip bombs unpacked in a sandbox",
        r"refused unzip ENOSPC[\s\S]*refused gunzip",
        script=BOMBS,
        audit=("limit.disk",),
        timeout_s=90,
    ),
    Attack(
        "archive-paths",
        "archives",
        "tar members with `..`, absolute names, links and devices",
        r"refused tar",
        script=TAR_OUT,
        unseen="tar's own refusals and the read-only system; the server does not see them",
    ),
    Attack(
        "archive-snapshots",
        "archives",
        "hostile archives and names sent to Receive as snapshots",
        r"refused tar with ways out[\s\S]*refused id",
        act=hostile_snapshots,
        audit=("request.refused",),
    ),
    Attack(
        "archive-templates",
        "archives",
        "templates whose paths leave, hide in .git, or contradict each other",
        r"refused template with '\.\./x'",
        act=hostile_templates,
        audit=("request.refused",),
    ),
)
