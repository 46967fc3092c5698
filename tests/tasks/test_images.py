"""Images: OCI layouts made here, flattened as runtimes that are whole roots, and seen by agents and verdicts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tarfile
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from contracts.artifacts import Artifact
from contracts.errors import ArtifactMissing
from contracts.runtimes import ROOT, runtime_archive
from contracts.store import Store, open_store
from contracts.tasks import Environment, Split, Task
from curation.errors import TaskError
from curation.tasks.agents import agent_named, play_task
from curation.tasks.bugs import file_diff
from curation.tasks.exporting.packages import packages_of
from curation.tasks.importing.copies import without_copies
from curation.tasks.importing.reading import Reading
from curation.tasks.runtimes import build_image
from curation.verify import Verifier
from envd.backends.base import Runtime
from envd.client import SandboxClient
from envd.errors import TemplateError
from envd.server.runtimes import Runtimes
from envd.types import Limits, ToolCall
from tests.oci import ARCHITECTURE, Layout, host_layers, layer, layer_of
from tests.wheels import pytest_wheels
from triplane_dagster.cli.app import app

PROGRAMS = {"usr/bin/bash": b"bash", "usr/bin/python3.12": b"python", "usr/bin/python3": "->python3.12"}
NEEDED = ("proc", "sys", "dev", "tmp", "workspace", ".template", ".scratch", ".envd", ".agent")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def tree(artifact: Artifact) -> dict[str, str | bytes | None]:
    """What is at each path: content, link, or None for a directory."""
    with tarfile.open(artifact.path(ROOT)) as tar:
        found: dict[str, str | bytes | None] = {}
        for each in tar:
            file = tar.extractfile(each) if each.isreg() else None
            found[each.name] = file.read() if file else f"->{each.linkname}" if each.issym() else None
            if each.islnk():
                found[each.name] = f"={each.linkname}"
            assert (each.uid, each.mtime) == (0, 0) and each.mode in (0o755, 0o644, 0o777)
        return found


def test_layers_lie_one_over_the_other(tmp_path: Path, store: Store) -> None:
    layout = Layout(tmp_path / "layout")
    bottom = PROGRAMS | {
        "bin": "->usr/bin",
        "a/x": b"1",
        "a/y": b"2",
        "b/old": b"3",
        "c/deep/one": b"4",
        "d": b"a file",
        "e/both": b"5",
        "e/same": "=e/both",
        "repo/.git/HEAD": b"history",
        "repo/fixed.py": b"answer",
        "testbed/fixed.py": b"answer",
        "proc/self": b"of another process",
        "var/tmp/left": b"6",
    }
    middle = {"a/.wh.x": b"", "b/.wh..wh..opq": b"", "b/new": b"7", "bin/tool": b"8", "c": b"now a file"}
    top = {"d/inside": b"now a directory", "loop": "->/usr/./bin/../bin", "loop/more": b"9", ".wh.c": b""}
    layout.add([layer_of(bottom), layer_of(middle), layer_of(top)])
    found = tree(build_image(store, layout.folder, leave_out=["/testbed/"]))
    assert next(iter(found)) == "."
    expected = {"a/y": b"2", "b/new": b"7", "bin": "->usr/bin", "usr/bin/tool": b"8", "usr/bin/more": b"9"}
    expected |= {"d/inside": b"now a directory", "e/both": b"5", "e/same": "=e/both", "repo/fixed.py": b"answer"}
    expected |= {"loop": "->/usr/./bin/../bin", "var/tmp": "->/tmp", "etc/resolv.conf": b"", **PROGRAMS}
    assert {path: found.get(path) for path in expected} == expected
    gone = ("a/x", "b/old", "c", "c/deep/one", "repo/.git", "testbed", "proc/self", "var/tmp/left", "bin/tool")
    assert not [path for path in gone if path in found]
    assert all(found[path] is None for path in (*NEEDED, "a", "d", "usr/bin"))


def test_digest_is_that_of_the_tree(tmp_path: Path, store: Store) -> None:
    digests = set()
    for number, packed in enumerate(("gzip", "zstd", "")):
        layout = Layout(tmp_path / f"layout{number}")
        layout.add([layer_of(PROGRAMS), layer(a=b"1")], packed=packed)
        digests.add(build_image(store, layout.folder).meta["digest"])
        archive = layout.tar(tmp_path / f"{number}.tar")
        again = build_image(open_store(str(tmp_path / f"other{number}")), archive)
        digests.add(again.meta["digest"])
    assert len(digests) == 1 and runtime_archive(store, digests.pop()).name == ROOT


def test_image_says_what_it_holds(tmp_path: Path, store: Store) -> None:
    layout = Layout(tmp_path / "layout")
    about = {"usr/lib/python3/site-packages/tool_box-1.2.dist-info/METADATA": b"", "opt/x.dist-info/METADATA": b""}
    layout.add([layer_of({**PROGRAMS, **about})], env=["A=b=c", "LANG=C"])
    image = build_image(store, layout.folder)
    assert image.json("packages.json") == [{"name": "tool_box", "version": "1.2"}]
    assert image.json("image.json")["env"] == {"A": "b=c", "LANG": "C", "PATH": image.json("image.json")["env"]["PATH"]}
    assert image.meta["packages"] == 1
    assert build_image(store, layout.folder).ref == image.ref


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([{k: v for k, v in PROGRAMS.items() if k != "usr/bin/bash"}], "no bash in its PATH"),
        ([{"usr/bin/bash": b""}], "no python3 in its PATH"),
        ([{"usr/bin/bash": b"", "usr/bin/python3": "->python3.9", "usr/bin/python3.9": b""}], "Python 3.9"),
        ([{**PROGRAMS, "a": "->b", "b": "->a", "a/x": b""}], "links in a circle"),
        ([{**PROGRAMS, "a": "=nowhere"}], "which it does not have"),
    ],
)
def test_unusable_images_are_refused(
    layers: list[Mapping[str, bytes | str | None]], says: str, tmp_path: Path, store: Store
) -> None:
    layout = Layout(tmp_path / "layout")
    layout.add([layer_of(each) for each in layers])
    with pytest.raises(TaskError, match=says):
        build_image(store, layout.folder)
    assert not list((tmp_path / "store").rglob("root.tar"))


def test_archives_that_are_none_are_refused(tmp_path: Path, store: Store) -> None:
    broken = tmp_path / "broken.tar"
    broken.write_bytes(b"no tar")
    with pytest.raises(TaskError, match=r"can't be read as an OCI image archive.*skopeo"):
        build_image(store, broken)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match="no OCI image archive"):
        build_image(store, tmp_path / "empty")
    layout = Layout(tmp_path / "layout")
    layout.add([layer_of(PROGRAMS)], name="one", packed="")
    layout.add([layer_of(PROGRAMS), layer(a=b"")], name="two", packed="")
    layout.add([layer_of(PROGRAMS)], name="three", architecture="s390x")
    with pytest.raises(TaskError, match=f"2 images for linux/{ARCHITECTURE}.*one, three, two"):
        build_image(store, layout.folder)
    with pytest.raises(TaskError, match="no image for"):
        build_image(store, layout.folder, name="three")
    with pytest.raises(TaskError, match="leave nothing"):
        build_image(store, layout.folder, name="one", leave_out=["/"])
    for blob in (layout.folder / "blobs/sha256").iterdir():
        if blob.read_bytes() == layer(a=b""):
            blob.write_bytes(layer(a=b"other"))
    assert build_image(store, layout.folder, name="one")
    with pytest.raises(TaskError, match=r"layer sha256:.*its content is another"):
        build_image(store, layout.folder, name="two")


def test_a_damaged_layer_is_named(tmp_path: Path, store: Store) -> None:
    layout = Layout(tmp_path / "layout")
    layout.add([layer_of({**PROGRAMS, "noise": os.urandom(5000)})])
    (packed,) = (each for each in (layout.folder / "blobs/sha256").iterdir() if each.read_bytes()[:2] == b"\x1f\x8b")
    packed.write_bytes(packed.read_bytes()[:10] + b"\xff" * 100)
    with pytest.raises(TaskError, match=r"layer sha256:.*can't be read"):
        build_image(store, layout.folder)


def put(runtimes: Runtimes, tar: bytes) -> str:
    digest = hashlib.sha256(tar).hexdigest()
    assert asyncio.run(runtimes.put(digest, len(tar), 0, tar)) == len(tar)
    return digest


@pytest.mark.parametrize("kind", [b"x", b"g", b"X", b"L", b"K"])
@pytest.mark.parametrize("size", [(64 << 10) + 1, 8 << 30, -513])
def test_server_reads_no_large_header_of_a_tar(tmp_path: Path, kind: bytes, size: int) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, size
    with pytest.raises(TemplateError, match=f"a header of {size} bytes"):
        put(Runtimes(tmp_path), header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))


@pytest.mark.parametrize("kind", [b"x", b"g"])
def test_server_keeps_no_extended_headers_in_memory(tmp_path: Path, kind: bytes) -> None:
    tar = b""
    for number in range(512):
        record = f" {number}={'0' * 60_000}\n"
        about = tarfile.TarInfo("about")
        about.type, about.size = kind, len(record) + 5
        file = tarfile.TarInfo(f"{number}.py").tobuf(tarfile.GNU_FORMAT)
        tar += about.tobuf(tarfile.GNU_FORMAT) + f"{about.size}{record}".encode().ljust(60_416, b"\0") + file
    digest = hashlib.sha256(tar).hexdigest()
    tracemalloc.start()
    asyncio.run(Runtimes(tmp_path).put(digest, len(tar), 0, tar))
    (_, peak), _ = tracemalloc.get_traced_memory(), tracemalloc.stop()
    assert len(list((tmp_path / digest).glob("*.py"))) == 512 and peak < 8 << 20


def test_server_refuses_headers_of_headers(tmp_path: Path) -> None:
    about = tarfile.TarInfo("about")
    about.type, about.size = b"x", 0
    with pytest.raises(TemplateError, match="can't be read"):
        put(Runtimes(tmp_path), about.tobuf(tarfile.GNU_FORMAT) * 2000)


def test_server_takes_long_names(tmp_path: Path) -> None:
    name = f"{'p' * 200}.py"
    good = put(Runtimes(tmp_path), layer_of({name: b"1"}))
    assert (tmp_path / good / name).read_bytes() == b"1"


def test_server_writes_through_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "runtimes").mkdir()
    runtimes = Runtimes(tmp_path / "runtimes")
    needed: dict[str, bytes | str | None] = dict.fromkeys((".", *NEEDED))
    refused = [
        {"way": f"->{outside}", "way/x": b"1"},
        {"way": "->dev", "way/x": b"1"},
        {"../x": b"1"},
        {"/x": b"1"},
        {"file": b"1", "file/x": b"2"},
        {"one": b"1", "two": "=../../outside"},
        {"way": f"->{outside}", "two": "=way"},
        {"a/b": b"in no directory"},
        {".envd/image.json": b'{"env": {"A=B": "c"}}'},
        {".envd/image.json": b'{"env": {"A": "' + b"x" * 40_000 + b'"}}'},
        {".envd/image.json": f"->{outside}"},
    ]
    for entries in refused:
        with pytest.raises(TemplateError):
            put(runtimes, layer_of({**needed, **entries}))
    with pytest.raises(TemplateError, match="needs the directory /workspace"):
        put(runtimes, layer_of({each: None for each in needed if each != "workspace"}))
    assert not list(outside.iterdir()) and not list((tmp_path / "runtimes").iterdir())
    good = put(runtimes, layer_of({**needed, "a": b"1", "b": "=a", "c": f"->{outside}"}))
    assert (tmp_path / "runtimes" / good / "a").samefile(tmp_path / "runtimes" / good / "b")


WRONG = b"from imagelib import one\n\n\ndef add(a, b):\n    return a - b + one - 1\n"
RIGHT = WRONG.replace(b"a - b", b"a + b")
TEST = """
import os, sys
from dataclasses import replace
from pathlib import Path
import pytest
from sums import add

def test_adds():
    assert add(2, 2) == 4

def test_sees_the_image_alone():
    assert os.environ["FROM_IMAGE"] == "yes" and Path("/etc/made-of").read_text() == "layers\\n"
    assert pytest.__file__.startswith("/opt/packages") and sys.executable == "/opt/bin/python3"
    for name in ("numpy", "torch", "click"):
        with pytest.raises(ImportError):
            __import__(name)
    assert not Path("/usr/share").exists()
"""
TESTS = tuple(f"tests/test_hidden.py::{name}" for name in ("test_adds", "test_sees_the_image_alone"))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    layout = Layout(tmp_path_factory.mktemp("image") / "layout")
    env = ["PATH=/opt/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH=/opt/packages", "FROM_IMAGE=yes"]
    layout.add(host_layers({"imagelib.py": b"one = 1\n"}), env=env, packed="")
    return build_image(open_store(str(tmp_path_factory.mktemp("store"))), layout.folder)


def make_task(runtime: str) -> Task:
    return Task(
        task_id="sums",
        family="sums",
        split=Split.TRAIN,
        instruction="mend add",
        files={"sums.py": WRONG},
        hidden_files={"tests/test_hidden.py": TEST.encode()},
        tests=TESTS,
        reference_diff=file_diff("sums.py", WRONG.decode(), RIGHT.decode()),
        meta={},
        environment=Environment(runtime),
    )


def test_commands_make_runtimes(tmp_path: Path) -> None:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["--store", str(tmp_path / "store"), "tasks", *arguments])

    layout = Layout(tmp_path / "layout")
    layout.add([layer_of(PROGRAMS)])
    archive = layout.tar(tmp_path / "image.tar")
    told = json.loads(run("image", str(archive), "--leave-out", "/testbed", "--json").stdout)
    found = run("image", str(archive), "--leave-out", "testbed")
    assert f"{{runtime: {told['runtime']}}}" in found.stdout and told["packages"] == []
    store = open_store(str(tmp_path / "store"))
    with pytest.raises(TaskError, match="is an image, of which no Dockerfile is known"):
        packages_of(store, told["runtime"])
    assert "no python3" in run("image", str(_without_python(tmp_path))).stderr
    (tmp_path / "wheels").mkdir()
    pytest_wheels(tmp_path / "wheels")
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository/sums.py").write_bytes(RIGHT)
    made = run("runtime", str(tmp_path / "repository"), "--wheelhouse", str(tmp_path / "wheels"), "--json")
    assert [each["name"] for each in json.loads(made.stdout)["packages"]][-1] == "pytest"


def _without_python(folder: Path) -> Path:
    layout = Layout(folder / "without-python")
    layout.add([layer_of({"usr/bin/bash": b""})])
    return layout.folder


def test_tasks_whose_image_holds_the_fixed_file_are_left_out(tmp_path: Path, store: Store) -> None:
    layout = Layout(tmp_path / "layout")
    layout.add([layer_of({**PROGRAMS, "testbed/sums.py": RIGHT, "other/sums.py": WRONG})])
    leaking, clean = (build_image(store, layout.folder, leave_out=out).meta["digest"] for out in ([], ["/testbed"]))
    reading = Reading([make_task(leaking), replace(make_task(clean), task_id="clean")])
    found = without_copies(reading, store)
    assert [task.task_id for task in found.tasks] == ["clean"]
    (broken,) = found.broken
    assert broken.task_id == "sums" and "fixed sums.py as /testbed/sums.py" in broken.reason
    with pytest.raises(ArtifactMissing, match="make it again"):
        without_copies(Reading([make_task("0" * 64)]), store)


@pytest.mark.slow
def test_agents_and_verdicts_see_the_image(image: Artifact, shown_by: str) -> None:
    task = make_task(image.meta["digest"])

    async def play() -> None:
        async with SandboxClient(shown_by) as client:
            verifier = Verifier(client, None, runtimes=image.store)
            noop = await play_task(task, agent_named("noop"), client, verifier, limits=Limits(), max_turns=4)
            assert [each.status for each in noop.verdict.tests] == ["failed", "passed"], noop.verdict
            oracle = await play_task(task, agent_named("oracle"), client, verifier, limits=Limits(), max_turns=4)
            assert oracle.verdict.solved, oracle.verdict
            template = await client.put_template(task.files)
            env = task.environment.variables(task.files) | {"MORE": "1"}
            async with await client.create(template, runtime=image.meta["digest"], env=env) as sandbox:
                command = (
                    "cat /etc/made-of; echo $FROM_IMAGE $MORE;"
                    " python3 -c 'import sums, pytest, sys; print(sys.executable)';"
                    " touch /opt/x || echo read-only; touch /workspace/y /tmp/z && echo writable"
                )
                exec_ = ToolCall("exec", {"command": command, "timeout_s": 60})  # QEMU may emulate the processor
                said = await sandbox.call(exec_, timeout_s=90)
                for each in ("layers\nyes 1\n/opt/bin/python3\n", "read-only\n", "writable\n"):
                    assert each in said.text, said.text
                read = await sandbox.call(ToolCall("read", {"path": "sums.py"}))
                assert "imagelib" in read.text

    asyncio.run(play())


def test_variables_of_a_request_come_before_those_of_the_image() -> None:
    runtime = Runtime("0" * 64, Path(), True, env=(("A", "1"), ("PYTHONPATH", "/opt/packages")))
    assert runtime.environment({}) == dict(runtime.env)
    wanted = {"A": "2", "B": "3", "PYTHONPATH": "/workspace"}
    expected = wanted | {"PYTHONPATH": "/workspace:/opt/packages"}
    assert runtime.environment(wanted) == runtime.environment(expected) == expected
