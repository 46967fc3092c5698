"""A checkout and its virtual environment may lie anywhere, also where sandboxes have directories of their own."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from envd.sandbox import python_inside

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
USE = """
import asyncio, json, sys
from envd.client import ToolCall
from envd.operations.client import OperationsClient
from envd.local import LocalEnvd

async def main(address):
    said = {}
    async with OperationsClient(address) as client:
        where = b"import sys, os\\n\\n\\ndef where():\\n    return sys.executable\\n"
        template = await client.put_template({"a.py": b"import os\\n", "b.py": where})
        async with await client.create(template) as sandbox:
            for name, command in json.loads(sys.argv[2]).items():
                said[name] = (await sandbox.call(ToolCall("exec", {"command": command}))).text
            said["lint"] = (await sandbox.call(ToolCall("lint", {}))).text
        tests = "import subprocess\\nimport extra_of_this_checkout as e\\nfrom b import where\\n\\n\\n"
        tests += "def test_runs():\\n    assert e.NAME == 'extra'\\n"
        tests += "    code = 'import extra_of_this_checkout as e; print(e.NAME)'\\n"
        tests += "    assert subprocess.check_output([where(), '-c', code]) == b'extra\\\\n'\\n"
        verdict = await client.verify(template, b"", {"test_h.py": tests.encode()}, ["test_h.py::test_runs"])
        said["verdict"] = [verdict.outcomes[0].status, verdict.outcomes[0].message]
    print(json.dumps(said))

with LocalEnvd(sys.argv[1], log_level="error") as server:
    asyncio.run(main(server.address))
"""
COMMANDS = {
    "python": "python -c 'import sys, extra_of_this_checkout; print(sys.version_info >= (3, 11))'",
    "pytest": "python -m pytest --version",
    "script": "greet",
    "read-only": "touch $(dirname $(command -v python))/x",
}


@pytest.fixture(params=["x", "two words, and more", "schlüssel-鍵"])
def checkout(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A checkout below /tmp with an environment of its own."""
    above = Path(tempfile.mkdtemp(dir="/tmp"))
    above.chmod(0o755)
    folder = above / request.param
    folder.mkdir()
    for name in ("envd", "contracts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    venv.create(folder / ".venv", symlinks=True, with_pip=False)
    packages = next((folder / ".venv/lib").glob("python3*/site-packages"))
    (packages / "ours.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    (packages / "extra_of_this_checkout.py").write_text("NAME = 'extra'\n")
    python = folder / ".venv/bin/python3"
    first = f"#!{python}\n" if " " not in str(python) else f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"
    (folder / ".venv/bin/greet").write_text(f"{first}import extra_of_this_checkout as e\nprint('hello', e.NAME)\n")
    (folder / ".venv/bin/greet").chmod(0o755)
    shutil.copy(Path(sys.prefix, "bin/ruff"), folder / ".venv/bin/ruff")
    yield folder
    shutil.rmtree(above)


@pytest.mark.parametrize("backend", ["namespaces", "plain"])
def test_a_checkout_below_tmp_works(checkout: Path, backend: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [checkout / ".venv/bin/python3", "-c", USE, backend, json.dumps(COMMANDS)],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["python"] == "True\nexit 0"
    assert said["pytest"].startswith("pytest ")
    assert said["script"] == "hello extra\nexit 0"
    assert "F401" in said["lint"]
    assert said["verdict"] == ["passed", ""]
    if backend == "namespaces":
        assert "Read-only file system" in said["read-only"]


def test_what_sandboxes_cover_is_moved_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    places = ("/home/someone/x/.venv", "/root/.pyenv", "/tmp/x/.venv", "/tmpx/.venv", "/workspace/.venv")
    monkeypatch.setattr(python_inside, "python_directories", lambda: places)
    moved = {place: python_inside.inside(f"{place}/bin/python") for place in places}
    assert moved == {
        "/home/someone/x/.venv": "/home/someone/x/.venv/bin/python",
        "/root/.pyenv": "/root/.pyenv/bin/python",
        "/tmp/x/.venv": "/.python/2/bin/python",
        "/tmpx/.venv": "/tmpx/.venv/bin/python",
        "/workspace/.venv": "/.python/4/bin/python",
    }
    assert python_inside.inside("/tmp/x/.venvs") == "/tmp/x/.venvs"


def test_modules_say_where_sandboxes_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    covered, other = ModuleType("covered"), ModuleType("other")
    covered.__file__, other.__file__ = "/tmp/x/.venv/lib/covered.py", "/usr/lib/other.py"
    monkeypatch.setattr(python_inside, "python_directories", lambda: ("/tmp/x/.venv",))
    monkeypatch.setattr(sys, "modules", {"covered": covered, "other": other})
    monkeypatch.setattr(sys, "path", ["/tmp/x/.venv/lib"])
    monkeypatch.setattr(sys, "executable", sys.executable)
    python_inside.adopt()
    assert (covered.__file__, other.__file__) == ("/.python/0/lib/covered.py", "/usr/lib/other.py")
    assert sys.path == ["/.python/0/lib"]
