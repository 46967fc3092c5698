"""Templates that are sent as a patch of a base: the same workspaces as whole ones, without a trace of the base."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from stat import S_ISREG

import pytest

from contracts.pb import envd_pb2 as pb
from envd.client import Access, Limits, Sandbox, SandboxClient, ToolCall
from envd.errors import BaseMissing, QuotaExceeded, TemplateError
from envd.fleet import open_client
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from envd.server.template_trees import read_tree
from envd.server.templates import Templates
from envd.trees import template_digest
from tests.envd.harness import Harness

SECRET = b"the_line_of_the_unbroken_code"
SMALL = Limits(memory_mb=64)
KEYS = ("first-key-of-enough-characters", "second-key-of-enough-characters")
SYSTEM = (
    "/proc /sys /dev /usr /lib /lib32 /lib64 /libx32 /bin /sbin /etc /opt /home /root /.python "
    f"{sys.prefix} {sys.base_prefix} {Path(__file__).resolve().parents[2]}"
)
"""Directories of a sandbox that are the machine's, with those that may hold its Python; searching them takes long."""
BASE = {
    "pkg/core.py": b"def half(n):\n    return n // 2  # " + SECRET + b"\n",
    "pkg/gone.py": b"# " + SECRET + b", removed\n",
    "pkg/deep/kept.py": b"KEPT = 1\n",
    "docs/only/removed.md": b"a directory that goes: " + SECRET + b"\n",
    "run": b"#!/bin/sh\necho run\n",
    "tool.py": b"TOOL = 1\n",
    **{f"lib/part{number}.py": b"PART = %d\n" % number for number in range(20)},
}
BROKEN = {path: data for path, data in BASE.items() if path not in ("pkg/gone.py", "docs/only/removed.md")} | {
    "pkg/core.py": b"def half(n):\n    return n\n",
    "tool.py": b"#!/usr/bin/env python3\nTOOL = 2\n",
    "new/dir/added.py": b"ADDED = 1\n",
}
LOOKS = (
    "find . -mindepth 1 -printf '%P %y %m %u %g %n %s %T@ %l\\n' | grep -v '^.git/index ' | sort",
    "find .git -type f ! -name index -exec sha256sum {} + | sort",
    "git log --format=raw --all; git reflog; git rev-parse HEAD",
    "git status --porcelain; git fsck --full --unreachable --dangling; git count-objects -v; git ls-files --stage",
    "git cat-file --batch-check --batch-all-objects; ls .git/objects/info .git/objects/pack; cat .git/config .git/HEAD",
    "for n in tool.py run; do stat -c '%A %h' $n; done; mount | grep -o '^.* on /workspace type [a-z]*'",
)
"""What an agent sees of a workspace; git's index holds numbers of inodes, which differ between any two copies."""


async def said(sandbox: Sandbox, *commands: str) -> list[str]:
    """Texts of commands that run one after another."""
    calls = [ToolCall("exec", {"command": command, "timeout_s": 20}) for command in commands]
    return [(await sandbox.call(call, timeout_s=20)).text for call in calls]


async def lose(client: SandboxClient, templates: int) -> None:
    """Have the server remove what it has, on which quotas allow that many templates."""
    for number in range(templates):
        await client.put_template({"other": str(number).encode()})


@pytest.fixture
def small() -> Iterator[Harness]:
    """A server that keeps three templates a key."""
    with LocalEnvd("plain", log_level="error", rules="quotas: {templates: 3}") as server:
        yield Harness(server.address)


def test_a_derived_template_gives_the_workspace_of_a_whole_one(anywhere: Harness) -> None:
    async def look(address: str, base: Mapping[str, bytes] | None) -> tuple[list[str], bytes]:
        async with OperationsClient(address) as client:
            template = await client.put_template(BROKEN, base)
            assert template == template_digest(BROKEN)
            async with await client.create(template, limits=SMALL) as sandbox:
                seen = await said(sandbox, *LOOKS)
                await sandbox.call(ToolCall("edit", {"path": "pkg/core.py", "line": 2, "new": "    return n // 2"}))
                return seen, await sandbox.finish()

    backend = anywhere.client(lambda client: client.info()).backend
    with LocalEnvd(backend, log_level="error") as fresh:
        whole, whole_diff = asyncio.run(look(fresh.address, None))
    derived, derived_diff = asyncio.run(look(anywhere.address, BASE))
    assert derived == whole and all(text.strip() for text in whole)
    assert derived_diff == whole_diff and b"+    return n // 2" in whole_diff


def test_nothing_of_the_base_is_left_in_a_derived_sandbox(namespaces: Harness) -> None:
    """Searches files, git's objects (compressed), the index and everything below / for lines, names and blobs."""
    search = (
        "import os, subprocess, sys, zlib\n"
        "want = [each.encode() for each in sys.argv[2:]]\n"
        "for top, dirs, names in os.walk('/'):\n"
        "    dirs[:] = [each for each in dirs if os.path.join(top, each) not in sys.argv[1].split()]\n"
        "    for name in names + dirs:\n"
        "        path = os.path.join(top, name)\n"
        "        found = [os.fsencode(path)]\n"
        "        try:\n"
        "            if os.path.isfile(path) and os.path.getsize(path) < 1 << 20:\n"
        "                found.append(open(path, 'rb').read())\n"
        "        except OSError: continue\n"
        "        for data in list(found):\n"
        "            try: found.append(zlib.decompress(data))\n"
        "            except zlib.error: pass\n"
        "        for each in want:\n"
        "            if any(each in data for data in found): print('FOUND', path, each)\n"
        "objects = subprocess.run('git cat-file --batch-all-objects --batch', shell=True, capture_output=True).stdout\n"
        "print('KEPT' in objects.decode(errors='replace'), [each for each in want if each in objects])\n"
    )

    async def search_in(client: OperationsClient, template: str) -> list[str]:
        words = f"the_line_of'_the_'unbroken gone'.py' removed'.md' {template_digest(BASE)[:20]}"
        async with await client.create(template, limits=SMALL) as sandbox:
            await sandbox.call(ToolCall("write", {"path": "s.py", "content": search}))
            return await said(
                sandbox,
                f"mv s.py /tmp/s.py; ls -a /; python3 /tmp/s.py '{SYSTEM}' {words}",
                "find . -type f -links +1; find . -newermt 2001-09-10 -mindepth 1; find /tmp -name '*patches*'",
            )

    async def job(client: OperationsClient) -> None:
        text, links = await search_in(client, await client.put_template(BROKEN, BASE))
        assert text.splitlines()[-2:] == ["True []", "exit 0"] and "FOUND" not in text, text
        assert links == "exit 0"
        control, _ = await search_in(client, template_digest(BASE))
        for each in ("FOUND /workspace/pkg/core.py", "FOUND /workspace/.git/objects", "True [b'the_line_of"):
            assert each in control

    namespaces.client(job)


def test_a_lost_base_is_put_again(small: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        first = await client.put_template(BROKEN, BASE)
        await lose(client, 3)
        with pytest.raises(TemplateError, match="call put_template first"):
            await client.create(first)
        request = pb.PutTemplateRequest(files={"tool.py": b""}, base=template_digest(BASE))
        with pytest.raises(BaseMissing, match="put the base first"):
            await client.ask("sandboxes.PutTemplate", request)
        assert await client.put_template(BROKEN, BASE) == first
        async with await client.create(first, limits=SMALL) as sandbox:
            assert (await said(sandbox, "cat tool.py; ls pkg"))[0].startswith(
                "#!/usr/bin/env python3\nTOOL = 2\ncore.py"
            )

    small.client(job)


def test_a_base_stays_as_long_as_any_key_has_what_is_derived_from_it(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n".join(KEYS) + "\n")

    async def job(address: str) -> None:
        one, other = (OperationsClient(address, Access(key=key)) for key in KEYS)
        async with one, other:
            template = await one.put_template(BROKEN, BASE)
            assert await other.put_template(BROKEN, BASE) == template
            await lose(one, 3)  # whoever has sent the base lets go of it, and of the template
            async with await other.create(template, limits=SMALL) as sandbox:
                assert (await said(sandbox, "cat new/dir/added.py"))[0] == "ADDED = 1\nexit 0"
            await lose(other, 3)
            for digest in (template, template_digest(BASE)):
                with pytest.raises(TemplateError, match="call put_template first"):
                    await other.create(digest)

    options = ["--key-file", str(tmp_path / "keys")]
    with LocalEnvd("plain", log_level="error", rules="quotas: {templates: 3}", options=options) as server:
        asyncio.run(job(server.address))


def test_many_templates_of_one_base_take_each_others_places(small: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        templates = [await client.put_template(BROKEN | {"n": str(n).encode()}, BASE) for n in range(12)]
        async with await client.create(templates[-1], limits=SMALL) as sandbox:
            assert (await said(sandbox, "cat n; git status --porcelain"))[0] == "11\nexit 0"

    small.client(job)


def test_a_template_derived_from_a_derived_one_is_that_of_the_whole_tree(plain: Harness) -> None:
    more = {path: data for path, data in BROKEN.items() if path != "run"} | {
        "pkg/gone.py": b"it comes back\n",
        "pkg/core.py": BASE["pkg/core.py"],
        "docs": b"now a file\n",
    }

    async def job(client: OperationsClient) -> None:
        assert await client.put_template(BROKEN, BASE) == template_digest(BROKEN)
        assert await client.put_template(more, BROKEN) == template_digest(more)
        assert await client.put_template(BASE, BASE) == template_digest(BASE)
        async with await client.create(template_digest(more), limits=SMALL) as sandbox:
            text = (await said(sandbox, "cat docs pkg/gone.py; ls run; git status --porcelain; git fsck"))[0]
        assert text.startswith("now a file\nit comes back\n") and "No such file" in text

    plain.client(job)


@pytest.mark.parametrize(
    ("changed", "removed", "error"),
    [
        ({"../up": b""}, [], "'../up' must be plain and relative, outside .git"),
        ({".git/hooks/x": b""}, [], "must be plain and relative"),
        ({"a" * 5000: b""}, [], "of at most 4096 characters"),
        ({"tool.py/below": b""}, [], "'tool.py/below' lies below 'tool.py', which is a file"),
        ({"lib": b""}, [], "lies below 'lib', which is a file"),
        ({}, ["pkg"], "removed path 'pkg' is no file of the base"),
        ({}, ["../x"], "removed path '../x' is no file of the base"),
        ({"tool.py": b""}, ["tool.py"], "'tool.py' is both changed and removed"),
    ],
)
def test_a_bad_path_is_refused(plain: Harness, changed: dict[str, bytes], removed: list[str], error: str) -> None:
    async def job(client: OperationsClient) -> None:
        base = await client.put_template(BASE)
        with pytest.raises(TemplateError, match=error):
            request = pb.PutTemplateRequest(files=changed, base=base, removed=removed)
            await client.ask("sandboxes.PutTemplate", request)

    plain.client(job)


def test_clients_derive_and_use_one_template_at_once(anywhere: Harness) -> None:
    base = BASE | {"concurrent": b"base"}

    async def job(client: OperationsClient) -> None:
        trees = [base | {"tool.py": b"TOOL = %d\n" % (number % 3)} for number in range(12)]
        clients = [OperationsClient(client.address) for _ in range(3)]
        for each in clients:
            await each.__aenter__()
        digests = await asyncio.gather(*(clients[n % 3].put_template(tree, base) for n, tree in enumerate(trees)))
        whole = asyncio.ensure_future(client.put_template(trees[0]))
        assert digests == [template_digest(tree) for tree in trees]
        boxes = await asyncio.gather(*(client.create(digest, limits=SMALL) for digest in digests))
        texts = await asyncio.gather(*(said(box, "cat tool.py; git status --porcelain") for box in boxes))
        assert [text for (text,) in texts] == [f"TOOL = {number % 3}\nexit 0" for number in range(12)]
        await asyncio.gather(
            whole, *(box.close() for box in boxes), *(each.__aexit__(None, None, None) for each in clients)
        )

    anywhere.client(job)


def test_a_verification_runs_on_a_derived_template(anywhere: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        files = BASE | {"pkg/core.py": b"def half(n):\n    return n\n", "verified": b""}
        diff = (
            b"diff --git a/pkg/core.py b/pkg/core.py\n--- a/pkg/core.py\n+++ b/pkg/core.py\n"
            b"@@ -1,2 +1,2 @@\n def half(n):\n-    return n\n+    return n // 2\n"
        )
        test = {"test_h.py": b"from pkg.core import half\n\n\ndef test_half():\n    assert half(4) == 2\n"}
        template = await client.put_template(files, BASE)
        results = [await client.verify(template, each, test, ["test_h.py::test_half"]) for each in (b"", diff)]
        assert [each.outcomes[0].status for each in results] == ["failed", "passed"]

    anywhere.client(job)


def test_a_verdict_on_a_derived_template_starts_without_a_repository(anywhere: Harness) -> None:
    test = (
        "import os, pathlib\n\n\ndef test_tree():\n"
        "    found = {str(each): (each.read_bytes(), os.access(each, os.X_OK)) for each in pathlib.Path().rglob('*')\n"
        "             if each.is_file() and '__pycache__' not in each.parts and each.name != 'test_h.py'}\n"
        f"    assert found == {{path: (data, data.startswith(b'#!')) for path, data in {BROKEN!r}.items()}}\n"
        "    assert not pathlib.Path('docs').exists() and not pathlib.Path('.git').exists()\n"
    ).encode()

    async def job(client: OperationsClient) -> None:
        template = await client.put_template(BROKEN, BASE)
        result = await client.verify(template, b"", {"test_h.py": test}, ["test_h.py::test_tree"])
        assert result.outcomes[0].status == "passed", result.outcomes[0].message

    anywhere.client(job)


def test_hidden_files_stay_hidden_in_a_derived_template(namespaces: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        template = await client.put_template(BROKEN, BASE)
        rules = "filesystem: {hidden: ['lib/*']}"
        async with await client.create(template, limits=SMALL, rules=rules) as sandbox:
            assert (await said(sandbox, "ls lib tool.py; git ls-files lib; git status --porcelain"))[0].split() == [
                "ls:",
                "cannot",
                "access",
                "'lib':",
                "No",
                "such",
                "file",
                "or",
                "directory",
                "tool.py",
                "exit",
                "0",
            ]

    namespaces.client(job)


@pytest.mark.slow
def test_several_servers_get_a_derived_template_when_they_need_it() -> None:
    async def job(addresses: str) -> None:
        async with open_client(addresses) as client:
            template = await client.put_template(BROKEN, BASE)
            boxes = [await client.create(template, limits=SMALL) for _ in range(4)]
            assert len({box.server.address for box in boxes}) == 2
            for box in boxes:
                assert (await said(box, "cat new/dir/added.py"))[0] == "ADDED = 1\nexit 0"
                await box.close()

    with LocalEnvd("plain", log_level="error") as one, LocalEnvd("plain", log_level="error") as other:
        asyncio.run(job(f"{one.address},{other.address}"))


def noise(seed: int, size: int) -> bytes:
    """Bytes that do not compress."""
    return random.Random(seed).randbytes(size)


def tree_of(size: int, files: int) -> dict[str, bytes]:
    """Text that does not compress to nothing."""
    rng = random.Random(size)
    line = lambda: f"value_{rng.randrange(10**9)} = {rng.randrange(10**9)}\n".encode()  # noqa: E731
    return {f"dir{n % 7}/file{n}.py": b"".join(line() for _ in range(size // files // 30)) for n in range(files)}


@pytest.mark.slow
def test_quotas_count_patches_and_the_copies_in_use(tmp_path: Path) -> None:
    base = tree_of(300_000, 20)  # 2 x 20 files in blocks of 4 KiB, and a repository: 0.7 MiB

    def variant(number: int) -> dict[str, bytes]:
        return base | {"dir0/file0.py": base["dir0/file0.py"] + b"# %d\n" % number}

    async def job(client: OperationsClient) -> None:
        templates = [await client.put_template(variant(number), base) for number in range(100)]
        assert templates[0] == template_digest(variant(0))
        one = await client.create(templates[0], limits=SMALL)  # base and a copy in 2 MiB
        with pytest.raises(QuotaExceeded, match="of templates that are in use: end some sandboxes"):
            await client.create(templates[1], limits=SMALL)
        await one.close()
        async with await client.create(templates[1], limits=SMALL) as two:  # the first copy made room
            assert (await said(two, "tail -n 1 dir0/file0.py"))[0] == "# 1\nexit 0"
        async with await client.create(templates[0], limits=SMALL):  # its patch was still there
            pass
        refused = [
            json.loads(each.detail_json)["quota"] async for each in client.audit() if each.kind == "quota.refused"
        ]
        assert refused == ["template_mb"]

    with LocalEnvd("plain", log_level="error", rules="quotas: {template_mb: 2, templates: 200}") as server:
        Harness(server.address).client(job)


def test_unused_copies_are_removed_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envd.server.templates._UNUSED", 300_000)
    base = tree_of(60_000, 4)

    async def scenario(templates: Templates) -> None:
        root = await templates.put(base)
        trees = [base | {"n": noise(number, 10 + number % 2 * 3000)} for number in range(6)]  # small and large patches
        derived = [await templates.derive(root, {"n": tree["n"]}, []) for tree in trees]
        for digest in [*derived, derived[0]]:
            await templates.ready(digest)
            with templates.held(digest):
                await asyncio.sleep(0)
                assert (templates.directory_of(digest) / ".git").is_dir()
            await asyncio.sleep(0)
            await templates.settled()
            copies = [each for each in derived if templates.directory_of(each).exists()]
            assert copies == [digest]
        assert [await asyncio.to_thread(templates.files_of, each) for each in derived] == trees
        assert sorted(each.name for each in (tmp_path / "patches").iterdir()) == sorted(derived[1::2])

    (tmp_path / "templates").mkdir()
    asyncio.run(scenario(Templates(tmp_path / "templates", os.geteuid())))


def test_copies_for_verdicts_share_files_with_each_other_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def entries(directory: Path) -> dict[str, os.stat_result]:
        return {str(each.relative_to(directory)): each.stat() for each in directory.rglob("*")}

    async def scenario(templates: Templates) -> None:
        root = await templates.put(BASE)
        removed = BASE.keys() - BROKEN.keys()
        first = await templates.derive(
            root, {path: BROKEN[path] for path in BROKEN if BROKEN[path] not in BASE.values()}, removed
        )
        second = await templates.derive(root, {"tool.py": b"TOOL = 3\n"}, [])
        assert await templates.ready_for_verdict(root) == root
        names = await asyncio.gather(*(templates.ready_for_verdict(each) for each in (first, second, first)))
        assert names == [f"{first}.verdict", f"{second}.verdict", f"{first}.verdict"]
        one, two = (templates.directory_of(name) for name in names[:2])
        assert read_tree(one) == BROKEN and read_tree(two) == BASE | {"tool.py": b"TOOL = 3\n"}
        assert not (one / "docs").exists() and not (one / ".git").exists()
        assert {each.st_mtime for each in entries(one).values()} == {1_000_000_000}
        await templates.ready(first)
        for directory in (templates.directory_of(root), templates.directory_of(first)):
            assert {each.st_nlink for each in entries(directory).values() if S_ISREG(each.st_mode)} == {1}
        for path in ("run", "pkg/deep/kept.py"):
            assert entries(one)[path].st_ino == entries(two)[path].st_ino
        monkeypatch.setattr("envd.server.templates._UNUSED", 0)
        with templates.held(second):
            pass
        await asyncio.sleep(0)
        await templates.settled()
        assert sorted(each.name for each in (tmp_path / "templates").iterdir()) == [root]
        assert read_tree(templates.directory_of(await templates.ready_for_verdict(first))) == BROKEN

    (tmp_path / "templates").mkdir()
    asyncio.run(scenario(Templates(tmp_path / "templates", os.geteuid())))


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.0, 0.05, 0.15])
def test_a_server_killed_while_it_derives_leaves_nothing(tmp_path: Path, moment: float) -> None:
    base = tree_of(1_000_000, 100)

    async def work(address: str) -> None:
        async with OperationsClient(address) as client:
            await client.put_template(base)
            for number in range(1000):
                template = await client.put_template(base | {"n": noise(number, 3000)}, base)
                async with await client.create(template, limits=SMALL):
                    pass

    async def use(client: OperationsClient) -> None:
        template = await client.put_template(BROKEN, BASE)
        async with await client.create(template, limits=SMALL) as sandbox:
            assert (await said(sandbox, "git status --porcelain"))[0] == "exit 0"

    async def killed(server: LocalEnvd, patches: Path) -> None:
        working = asyncio.ensure_future(work(server.address))
        while not (patches.is_dir() and any(patches.iterdir())):
            await asyncio.sleep(0.005)
        await asyncio.sleep(moment)
        assert server._process is not None
        os.kill(server._process.pid, signal.SIGKILL)
        with pytest.raises(Exception, match="did not answer"):
            await working

    state = tmp_path / "state"
    with LocalEnvd("plain", log_level="error", options=["--state-dir", str(state)]) as server:
        (run_dir,) = state.iterdir()
        asyncio.run(killed(server, run_dir / "patches"))
    with LocalEnvd("plain", log_level="error", options=["--state-dir", str(state)]) as server:
        assert not run_dir.exists()
        Harness(server.address).client(use)
    assert not state.exists() or not any(state.iterdir())
