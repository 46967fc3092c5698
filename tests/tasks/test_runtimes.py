"""Runtimes: resolved and locked from a folder of wheels made here, built, and seen by agents and verdicts."""

import asyncio
import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from with_client import with_client

from contracts.artifacts import Artifact, find_artifact
from contracts.errors import ArtifactMissing
from contracts.failpoints import KILL_VARIABLE
from contracts.runtimes import ARCHIVE, runtime_archive
from contracts.store import Store, open_store
from contracts.tasks import Environment, Split, Task, read_tasks, tasks_table
from curation.errors import TaskError
from curation.tasks.agents import agent_named, play_task
from curation.tasks.bugs import file_diff
from curation.tasks.runtimes import Lock, build_runtime, resolve
from curation.verdicts import Verdict
from curation.verify import Verifier
from envd.backends.base import Runtime
from envd.client import Limits, SandboxClient
from envd.errors import RuntimeMissing, TemplateError, Unsupported
from envd.local import LocalEnvd
from envd.sandbox import python_inside
from envd.server.runtimes import Runtimes
from envd.types import ToolCall
from tests.wheels import pytest_wheels, write_wheel

PROJECT = """
[project]
name = "Sums"
version = "1.5"
dependencies = ["onemore>=1"]
[project.optional-dependencies]
test = ["sums[plugin]", "pytest"]
plugin = ["watcher"]
"""
WRONG = b"from onemore import more\n\n\ndef add(a, b):\n    return a - b\n"
RIGHT = WRONG.replace(b"a - b", b"a + b")
TREE = {"pyproject.toml": PROJECT.encode(), "src/sums/__init__.py": WRONG}
HIDDEN = """
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest
from sums import add, more


def test_adds():
    assert add(2, 2) == 4


def test_sees_its_packages_alone(watched):
    assert more(1) == 2 and watched == "yes"
    assert metadata.version("sums") == "1.5"
    for name in ("click", "jinja2", "attr", "numpy", "pip", "setuptools", "envd.client"):
        with pytest.raises(ImportError):
            __import__(name)
    assert pytest.__file__.startswith(str(Path(sys.modules["onemore"].__file__).parents[1]))


def test_judge_is_another_user():
    about = Path(f"/proc/{os.getppid()}/status").read_text().splitlines()
    judge = next(line for line in about if line.startswith("Uid"))
    assert judge.split()[1] == "1" or Path("/proc/self/uid_map").read_text().split()[1] != "231072"


def test_interpreter_is_fresh():
    assert sys.flags.safe_path and metadata.version("pytest") == "99.0"
"""
TESTS = tuple(f"tests/test_hidden.py::{name}" for name in ("test_adds", "test_sees_its_packages_alone"))


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    pytest_wheels(folder)
    _own_wheels(folder)
    return folder


def _own_wheels(folder: Path) -> None:
    code = b"def more(n):\n    return n + 1\n"
    write_wheel(folder, "onemore", "1.0", {"onemore/__init__.py": code}, ("sums",), "License-Expression: MIT\n")
    plugin = (
        b"import pytest\n\n\n@pytest.fixture\ndef watched(pytestconfig):\n    return pytestconfig.getini('watch')\n\n\n"
    )
    plugin += b"def pytest_addoption(parser):\n    parser.addini('watch', '', default='no')\n"
    licence = "Classifier: License :: OSI Approved :: X\n"
    write_wheel(folder, "watcher", "2.0", {"watcher.py": plugin}, ("pytest",), licence, plugin="watcher")
    write_wheel(folder, "sums", "1.0", {"sums/__init__.py": RIGHT})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(str(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
def runtime(store: Store, wheelhouse: Path) -> Artifact:
    return build_runtime(store, resolve(TREE, wheelhouse=wheelhouse), wheelhouse=wheelhouse)


@pytest.fixture(scope="module")
def other_runtime(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("other-wheels")
    pytest_wheels(folder, other=True)
    _own_wheels(folder)
    return build_runtime(store, resolve(TREE, wheelhouse=folder), wheelhouse=folder)


def make_task(runtime: Artifact, **environment: object) -> Task:
    found = Environment(runtime.meta["digest"], ("watcher",), (("watch", "yes"),))
    return Task(
        task_id="sums-1",
        family="sums",
        split=Split.TRAIN,
        instruction="Mend add.",
        files=TREE,
        hidden_files={"tests/test_hidden.py": HIDDEN.encode()},
        tests=TESTS,
        reference_diff=file_diff("src/sums/__init__.py", WRONG.decode(), RIGHT.decode()),
        meta={"path": "src/sums/__init__.py"},
        environment=dataclasses.replace(found, **environment),
    )


def grade(task: Task, diff: bytes, store: Store, shown_by: str) -> Verdict:
    return with_client(shown_by, lambda client: Verifier(client, None, runtimes=store).grade(task, diff))


def test_lock_holds_what_package_and_tests_need_but_not_the_package(wheelhouse: Path) -> None:
    lock = resolve(TREE, wheelhouse=wheelhouse)
    names = [each.partition("==")[0] for each in lock.packages]
    assert names == ["iniconfig", "onemore", "packaging", "pluggy", "pygments", "pytest", "watcher"]
    assert all("--hash=sha256:" in each for each in lock.packages)
    assert (lock.name, lock.version) == ("Sums", "1.5")
    assert resolve(TREE, wheelhouse=wheelhouse).key == lock.key
    other = resolve({**TREE, "pyproject.toml": b"[project]\nname='sums'\nversion='1'\n"}, wheelhouse=wheelhouse)
    assert other.key != lock.key and "onemore" not in str(other.packages)


def test_artifact_is_equal_in_every_store_and_names_licences(
    runtime: Artifact, wheelhouse: Path, store: Store, tmp_path: Path
) -> None:
    lock = resolve(TREE, wheelhouse=wheelhouse)
    again = build_runtime(open_store(str(tmp_path)), lock, wheelhouse=wheelhouse)
    assert again.ref == runtime.ref and again.meta["digest"] == runtime.meta["digest"]
    assert build_runtime(store, lock, wheelhouse=tmp_path / "gone").ref == runtime.ref  # found, nothing installed
    licences = {each["name"]: each["licence"] for each in runtime.json("packages.json")}
    assert (licences["onemore"], licences["watcher"], licences["pytest"]) == ("MIT", "X", "unknown")
    assert [each["name"] for each in runtime.json("packages.json") if each["plugins"] == ["watcher"]] == ["watcher"]
    with tarfile.open(runtime.path(ARCHIVE)) as archive:
        names = archive.getnames()
    assert "onemore/__init__.py" in names and "Sums-1.5.dist-info/METADATA" in names
    assert not any(name.startswith("sums/") or "RECORD.jws" in name for name in names)
    assert runtime_archive(store, runtime.meta["digest"]) == runtime.path(ARCHIVE)
    with pytest.raises(ArtifactMissing, match="runtime 000000000000 of the task's environment is missing"):
        runtime_archive(store, "0" * 64)


@pytest.mark.parametrize("point", ["artifact-staged", "before-manifest", "after-manifest"])
def test_killed_build_leaves_nothing_or_all_and_is_repeated(
    point: str, runtime: Artifact, wheelhouse: Path, tmp_path: Path
) -> None:
    lock = resolve(TREE, wheelhouse=wheelhouse)
    script = (
        "import sys; from pathlib import Path; from contracts.store import open_store\n"
        "from curation.tasks.runtimes import Lock, build_runtime\n"
        "lock = Lock.model_validate_json(sys.argv[1])\n"
        "build_runtime(open_store(sys.argv[2]), lock, wheelhouse=Path(sys.argv[3]))\n"
    )
    command = [sys.executable, "-c", script, lock.model_dump_json(), str(tmp_path), str(wheelhouse)]
    assert subprocess.run(command, env=os.environ | {KILL_VARIABLE: point}, check=False).returncode == -9
    store = open_store(str(tmp_path))
    assert (find_artifact(store, "runtime", lock.key) is not None) == (point == "after-manifest")
    assert build_runtime(store, lock, wheelhouse=wheelhouse).ref == runtime.ref


BAD: dict[str, tuple[dict[str, bytes], str]] = {
    "wheel-missing": ({"pyproject.toml": b"[project]\nname='a'\ndependencies=['absent>2']\n"}, "absent.*put the wheel"),
    "no-wheel": ({"pyproject.toml": b"[project]\nname='a'\ndependencies=['onlysource']\n"}, "onlysource.*C extension"),
    "toml": ({"pyproject.toml": b"[project\n"}, "pyproject.toml can't be parsed"),
    "type": ({"pyproject.toml": b"project = 3\n"}, "pyproject.toml has a value of a wrong type"),
    "name-type": ({"pyproject.toml": b"[project]\nname=5\n"}, r"a value of a wrong type \(name: .*string"),
    "version-type": ({"setup.py": b"setup(name='a', version=1.0)\n"}, r"a value of a wrong type \(version: .*string"),
    "extras-type": ({"setup.py": b"setup(name='a', extras_require=['b'])\n"}, "setup.py has a value of a wrong type"),
    "points-type": ({"pyproject.toml": b"[project.entry-points]\na='b'\n"}, r"wrong type \(entry_points.a: "),
    "name-path": ({"pyproject.toml": b"[project]\nname='/tmp/evil'\n"}, "name is a path: '/tmp/evil'"),
    "name-above": ({"PKG-INFO": b"Name: ../..\nVersion: 1\n", "a.py": b""}, r"name is a path: '\.\./\.\.'"),
    "deep": ({"setup.py": b"x = " + b"+".join([b"1"] * 5000)}, "setup.py can't be parsed .nested too deeply"),
    "deep-toml": ({"pyproject.toml": b"x = " + b"[" * 5000}, "pyproject.toml is nested too deeply"),
    "requirement": ({"pyproject.toml": b"[project]\nname='a'\ndependencies=['=1']\n"}, "requirement '=1' is invalid"),
    "computed": (
        {"setup.py": b"setup(name='a', install_requires=open('r').readlines())\n"},
        "computes install_requires",
    ),
    "syntax": ({"setup.py": b"setup(\n"}, "setup.py can't be parsed"),
    "extension": ({"setup.py": b"setup(name='a', ext_modules=[Extension('a', ['a.c'])])\n"}, "C extension.*compiled"),
    "meson": ({"pyproject.toml": b"[build-system]\nbuild-backend='mesonpy'\n"}, "compiled with meson"),
    "latin": ({"setup.cfg": b"# \xe9\n"}, "setup.cfg is not UTF-8"),
    "nothing": ({"README": b""}, "holds no Python"),
    "pytest": ({"pyproject.toml": b"[project]\nname='pluggy'\n"}, "which pytest itself needs"),
    "too-old": ({"pyproject.toml": b"[project]\nname='a'\n[dependency-groups]\ntest=['pytest<7']\n"}, "pytest<7"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata_is_one_line_that_names_it(case: str, wheelhouse: Path) -> None:
    (wheelhouse / "onlysource-1.tar.gz").write_bytes(b"")
    tree, words = BAD[case]
    with pytest.raises(TaskError, match=words) as caught:
        resolve(tree, wheelhouse=wheelhouse)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "version", "kept"),
    [
        ("a", "@VERSION@", ("a", "0")),
        ("a", "1.0-SNAPSHOT", ("a", "0")),
        ("UNKNOWN", "2004d", ("UNKNOWN", "0")),
        ("a", "1/../../b", ("a", "0")),
        ("my pack", "1.0+x", ("my-pack", "1.0+x")),
        ("..", "1", ("", "1")),
        ("p\u00e2ck_.", "", ("p-ck", "0")),
    ],
)
def test_names_and_versions_that_are_none_are_mended(
    name: str, version: str, kept: tuple[str, str], wheelhouse: Path, tmp_path: Path
) -> None:
    about = f"[project]\nname={name!r}\nversion={version!r}\n"
    lock = resolve({"pyproject.toml": about.encode()}, wheelhouse=wheelhouse)
    assert (lock.name, lock.version) == kept
    with tarfile.open(build_runtime(open_store(str(tmp_path)), lock, wheelhouse=wheelhouse).path(ARCHIVE)) as archive:
        own = f"{kept[0].replace('-', '_')}-{kept[1]}.dist-info/METADATA"
        assert (own in archive.getnames()) == bool(kept[0])


def test_missing_folder_and_changed_wheel_are_one_line(wheelhouse: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="is not a folder"):
        resolve(TREE, wheelhouse=tmp_path / "none")
    lock = resolve(TREE, wheelhouse=wheelhouse)
    pytest_wheels(tmp_path)
    _own_wheels(tmp_path)
    write_wheel(tmp_path, "onemore", "1.0", {"onemore/__init__.py": b"evil = 1\n"})
    with pytest.raises(TaskError, match=r"Hash mismatch.*onemore"):
        build_runtime(open_store(str(tmp_path / "store")), lock, wheelhouse=tmp_path)
    assert find_artifact(open_store(str(tmp_path / "store")), "runtime", lock.key) is None


SOURCES: dict[str, tuple[dict[str, bytes], list[str]]] = {
    "groups": (
        {
            "pyproject.toml": b"[project]\nname='a'\n[dependency-groups]\ntests=[{include-group='x'}, 'b']\n"
            b"x=['c']\nd=['e']\n"
        },
        ["b", "c"],
    ),
    "poetry": (
        {
            "pyproject.toml": b"[tool.poetry]\nname='a'\n[tool.poetry.dependencies]\npython='^3.9'\nb='^1.2'\n"
            b"c={version='~0.3.1', extras=['x']}\n[tool.poetry.group.dev.dependencies]\nd='*'\n"
        },
        ["b<2,>=1.2", "c[x]<0.4,>=0.3.1", "d"],
    ),
    "setup-cfg": (
        {
            "setup.cfg": b"[metadata]\nname = a\nversion = attr: a.v\n[options]\ninstall_requires =\n  b>1\n  c; "
            b"python_version < '3'\n[options.extras_require]\ntesting =\n  d\ndocs = e\n",
            "setup.py": b"from setuptools import setup\nsetup()\n",
        },
        ["b>1", 'c; python_version < "3"', "d"],
    ),
    "setup-py": (
        {"setup.py": b"NEEDS = ['b']\nsetup(name='a', install_requires=NEEDS, extras_require={'dev': ['c']})\n"},
        ["b", "c"],
    ),
    "pkg-info": (
        {
            "PKG-INFO": b"Metadata-Version: 2.1\nName: a\nVersion: 3\nRequires-Dist: b>1\nRequires-Dist: c; "
            b'python_version < "3" and extra == "test"\nRequires-Dist: d; extra == "docs"\n',
            "setup.py": b"setup(install_requires=open('r').read())\n",
        },
        ["b>1", 'c; python_version < "3"'],
    ),
    "file": (
        {"a.py": b"", "requirements/tests.txt": b"-r x\n# no\nb==1 \\\n    --hash=sha256:0\nc # why\n"},
        ["b==1", "c"],
    ),
    "url": ({"pyproject.toml": b"[project]\nname='a'\ndependencies=['b @ git+https://x/y', 'c']\n"}, ["c"]),
}


@pytest.mark.parametrize("source", SOURCES)
def test_requirements_are_read_from(source: str) -> None:
    from curation.tasks.runtimes import read_project

    tree, expected = SOURCES[source]
    found = read_project(tree)
    assert found.requirements == expected
    assert [each.replace(" ", "") for each in found.left_out] == (["b@git+https://x/y"] if source == "url" else [])


@pytest.mark.parametrize("which", ["runtime", pytest.param("other_runtime", marks=pytest.mark.slow)])
def test_verdict_sees_the_packages_of_the_task_alone(
    which: str, request: pytest.FixtureRequest, store: Store, shown_by: str
) -> None:
    runtime = request.getfixturevalue(which)
    task = make_task(runtime)
    solved = grade(task, task.reference_diff, store, shown_by)
    assert solved.solved and not solved.findings, solved
    judged = [f"tests/test_hidden.py::{name}" for name in ("test_judge_is_another_user", "test_interpreter_is_fresh")]
    judge = dataclasses.replace(task, tests=tuple(judged))
    fresh = "passed" if which == "other_runtime" else "failed"
    assert [each.status for each in grade(judge, task.reference_diff, store, shown_by).tests] == ["passed", fresh]
    if which == "other_runtime":
        return  # the rest is as with the other one
    wrong = grade(task, b"", store, shown_by)
    assert [each.status for each in wrong.tests] == ["failed", "passed"]
    bare = dataclasses.replace(task, environment=Environment())
    assert {each.status for each in grade(bare, task.reference_diff, store, shown_by).tests} == {"error"}


def test_deadline_is_of_the_task(runtime: Artifact, store: Store, shown_by: str) -> None:
    slow = {"tests/test_hidden.py": b"import time\n\n\ndef test_adds():\n    time.sleep(30)\n"}
    task = dataclasses.replace(make_task(runtime, timeout_s=0.5), hidden_files=slow, tests=TESTS[:1])
    assert grade(task, b"", store, shown_by).exit == "timed_out"


def test_directories_with_modules_are_found_topmost_and_known_ones_left(tmp_path: Path) -> None:
    for path in ("lib/tool/deep/a.py", "lib/tool/deep/below/b.py", "lib/known/c.py", "lib/x/bin/d.py", "share/e.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    found = list(python_inside._with_modules(str(tmp_path), {f"{tmp_path}/lib/known"}))
    assert found == [f"{tmp_path}/lib/tool/deep"]
    assert sysconfig.get_path("stdlib") not in python_inside.package_places()


@pytest.mark.parametrize("shown_by", ["namespaces"], indirect=True)  # others have a system of their own
def test_agent_sees_no_other_software_written_in_python(runtime: Artifact, store: Store, shown_by: str) -> None:
    """Its functions may be solutions, such as `to_unicode` of LLVM's test runner for that of boltons."""
    search = (
        "find /usr -name '*.py' -not -path '/usr/*bin/*' 2>/dev/null"
        " | grep -vE '^/usr/(local/)?lib[0-9]*/python3[0-9.]*/' | head"
    )

    async def job(client: SandboxClient) -> str:
        await client.put_runtime(runtime.meta["digest"], runtime.path(ARCHIVE))
        template = await client.put_template(TREE)
        async with await client.create(template, runtime=runtime.meta["digest"]) as sandbox:
            return (await sandbox.call(ToolCall("exec", {"command": f"{search}; echo end"}), timeout_s=60)).text

    assert with_client(shown_by, job).startswith("end\n")


@pytest.mark.parametrize("shown_by", ["namespaces"], indirect=True)  # others end the whole sandbox
def test_memory_is_of_the_task(runtime: Artifact, store: Store, shown_by: str) -> None:
    big = {"tests/test_hidden.py": b"def test_adds():\n    assert len(bytearray(100 << 20))\n"}
    task = dataclasses.replace(make_task(runtime, memory_mb=80), hidden_files=big, tests=TESTS[:1])
    assert not grade(task, b"", store, shown_by).solved
    task = dataclasses.replace(task, environment=dataclasses.replace(task.environment, memory_mb=400))
    assert grade(task, b"", store, shown_by).solved


def test_agent_sees_the_packages_and_can_change_none(runtime: Artifact, store: Store, shown_by: str) -> None:
    task, digest = make_task(runtime), runtime.meta["digest"]
    place = "$(python -c 'import onemore; print(onemore.__path__[0])')"
    commands = (
        "python -m pytest -q -p no:cacheprovider tests 2>&1 | tail -3;"
        " python -c 'import sums, watcher; print(sums.__file__)'",
        'for name in click jinja2 attr numpy pip setuptools; do python -c "import $name" 2>&1 | tail -1; done',
        "find /usr $(python -c 'import sys; print(sys.prefix, sys.base_prefix)') \\( -path '*/jinja2/__init__.py' -o"
        " -path '*/click/core.py' -o -path '*/attr/_make.py' \\) 2>/dev/null | wc -l",
        f"touch {place}/x; echo 0 > {place}/__init__.py; rm -r {place}; chmod 777 {place}; mount -o remount,rw {place};"
        f" umount -l {place}; mv {place} /tmp/; python -c 'import onemore; print(onemore.more(1))'",
    )

    async def job(client: SandboxClient) -> list[str]:
        await client.put_runtime(digest, runtime.path(ARCHIVE))
        template = await client.put_template(task.files | task.hidden_files)
        variables = task.environment.variables(task.files)
        async with await client.create(template, runtime=digest, env=variables) as sandbox:
            return [(await sandbox.call(ToolCall("exec", {"command": each}), timeout_s=60)).text for each in commands]

    tests, imports, copies, changes = with_client(shown_by, job)
    assert "/workspace/src/sums/__init__.py" in tests and "2 failed, 2 passed" in tests, tests
    assert imports.count("No module named") == 6, imports
    assert copies.startswith("0\n"), copies
    refused = changes.count("Read-only file system") + changes.count("Permission denied")  # the latter in gVisor
    assert "2\n" in changes and refused >= 4, changes


def test_oracle_plays_a_task_in_its_environment(runtime: Artifact, store: Store, shown_by: str) -> None:
    task = make_task(runtime)

    async def job(client: SandboxClient) -> Verdict:
        verifier = Verifier(client, None, runtimes=store)
        played = await play_task(task, agent_named("oracle"), client, verifier, limits=Limits(), max_turns=5)
        return played.verdict

    assert with_client(shown_by, job).solved


def test_environment_is_of_the_task_digest_and_survives_storage(runtime: Artifact) -> None:
    task = make_task(runtime, timeout_s=20.0, memory_mb=1024)
    (back,) = read_tasks(tasks_table([task]))
    assert back == task and back.digest == task.digest
    digests = {
        dataclasses.replace(task, environment=each).digest
        for each in (
            Environment(),
            task.environment,
            dataclasses.replace(task.environment, runtime="0" * 64),
            dataclasses.replace(task.environment, plugins=()),
            dataclasses.replace(task.environment, ini=()),
            dataclasses.replace(task.environment, timeout_s=21.0),
            dataclasses.replace(task.environment, memory_mb=None),
        )
    }
    assert len(digests) == 7
    assert "environment" not in json.loads(
        tasks_table([dataclasses.replace(task, environment=Environment())])["meta"][0].as_py()
    )


def test_interrupted_upload_goes_on_and_wrong_archives_are_refused(
    runtime: Artifact, tmp_path: Path, shown_by: str
) -> None:
    from contracts.pb import envd_pb2 as pb

    # a tar of its own, which this server has not got yet
    tar = tmp_path / "x.tar"
    (tmp_path / "new.py").write_text("n = 1\n")
    with tarfile.open(tar, "w") as archive:
        archive.add(tmp_path / "new.py", "new.py")
    digest, size = hashlib.sha256(tar.read_bytes()).hexdigest(), tar.stat().st_size

    async def job(client: SandboxClient) -> None:
        async def put(offset: int, data: bytes, name: str = digest) -> int:
            request = pb.PutRuntimeRequest(digest=name, size=size, offset=offset, data=data)
            return int((await client.ask("sandboxes.PutRuntime", request)).received)

        template = await client.put_template(TREE)
        assert await put(0, tar.read_bytes()[:1000]) == 1000
        with pytest.raises(RuntimeMissing, match="call put_runtime first"):
            await client.create(template, runtime=digest)
        assert await put(0, b"again") == 1000  # another client is told where to go on
        await client.put_runtime(digest, tar)
        async with await client.create(template, runtime=digest) as sandbox:
            said = await sandbox.call(ToolCall("exec", {"command": "python -c 'import new; print(new.n)'"}))
        assert said.text.startswith("1\n")
        with pytest.raises(TemplateError, match="another SHA-256"):
            await put(0, tar.read_bytes(), "1" * 64)
        with pytest.raises(TemplateError, match="named by its SHA-256"):
            await put(0, b"", "../x")
        for name, kind in (
            ("../x", tarfile.REGTYPE),
            ("/x", tarfile.REGTYPE),
            ("x", tarfile.SYMTYPE),
            ("x", tarfile.CHRTYPE),
        ):
            bad = tmp_path / "bad.tar"
            about = tarfile.TarInfo(name)
            about.type, about.linkname = kind, "/etc/passwd"
            with tarfile.open(bad, "w") as archive:
                archive.addfile(about)
            with pytest.raises(TemplateError, match="can't be unpacked"):
                await client.put_runtime(hashlib.sha256(bad.read_bytes()).hexdigest(), bad)

    with_client(shown_by, job)


def test_backend_that_shows_the_hosts_packages_refuses(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"\0" * 10240)  # an empty tar
    digest = hashlib.sha256(b"\0" * 10240).hexdigest()
    with LocalEnvd("plain") as envd:

        async def job(client: SandboxClient) -> None:
            await client.put_runtime(digest, tmp_path / "x.tar")
            template = await client.put_template(TREE)
            with pytest.raises(Unsupported, match="plain backend can't show a task's own packages"):
                await client.create(template, runtime=digest)
            with pytest.raises(Unsupported, match="plain backend"):
                await client.verify(template, b"", {}, ["x"], runtime=digest)

        with_client(envd.address, job)


def test_lock_survives_json(wheelhouse: Path) -> None:
    lock = resolve(TREE, wheelhouse=wheelhouse)
    assert Lock.model_validate_json(lock.model_dump_json()).key == lock.key


def tar_of_one_module(number: int) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(f"m{number}.py"))
    return data.getvalue()


def test_server_takes_a_runtime_while_as_many_as_it_keeps_are_in_use(tmp_path: Path) -> None:
    kept = Runtimes(tmp_path, most=2)
    shows: Any = SimpleNamespace(name="namespaces", features=SimpleNamespace(can={"runtime"}))

    async def run() -> None:
        for tar in map(tar_of_one_module, range(4)):
            name = hashlib.sha256(tar).hexdigest()
            await kept.put(name, len(tar), 0, tar)
            kept.hold(kept.require(name, shows))

    asyncio.run(run())


def test_server_drops_the_runtime_that_was_not_used_for_longest(tmp_path: Path) -> None:
    kept, gone = Runtimes(tmp_path, most=2), list[str]()

    async def removed(digest: str) -> None:
        gone.append(digest)

    kept.on_removed = removed
    tars = [tar_of_one_module(number) for number in range(4)]
    names = [hashlib.sha256(each).hexdigest() for each in tars]

    async def run() -> None:
        for number, (name, tar) in enumerate(zip(names, tars, strict=True)):
            assert await kept.put(name, len(tar), 0, tar) == len(tar)
            if number == 0:
                kept.hold(Runtime(name, tmp_path / name))  # a sandbox uses it
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([names[0], *names[2:]])
        assert gone == names[1:2], "two are kept besides the one in use"
        kept.release(Runtime(names[0], tmp_path / names[0]))

    asyncio.run(run())
