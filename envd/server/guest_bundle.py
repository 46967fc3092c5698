"""Bundle of the packages for a verification inside a guest: envd's verifier and pytest, of this installation.

The guest's Python may have no pytest, or another version; with the bundle, verdicts on all backends come from the same
code. The bundle includes bytecode, so that a guest with the same Python version compiles nothing: a machine's processor
may be emulated.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import marshal
import os
import struct
import subprocess
import sys
from pathlib import Path

from envd.errors import BackendUnavailable

_LIST = """
import json, sys, envd.sandbox.in_guest, envd.sandbox.verifier
names = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
names -= {"sitecustomize", "usercustomize"}  # of this machine
names = {name for name in names if name == "_pytest" or not name.startswith("_")}
print(json.dumps({name: module.__file__ for name, module in sys.modules.items()
                  if name.partition(".")[0] in names and (getattr(module, "__file__", "") or "").endswith(".py")}))
"""
_WHOLE = ("_pytest", "pytest", "pluggy")
"""Packages that are sent whole, since they import submodules later."""
_OURS = ("contracts", "envd")
_ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def bundle(with_pytest: bool = True) -> bytes:
    """Bytes of all files, each preceded by the lengths of its name and content.

    with_pytest: without, only our own packages, for a sandbox with a runtime.

    Blocks for half a second at the first call. Raises BackendUnavailable.
    """
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([sys.executable, "-c", _LIST], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise BackendUnavailable(
            f"the verifier can't be sent to guests: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
        )
    files: dict[str, Path] = {}
    for name, where in json.loads(done.stdout.splitlines()[-1]).items():
        path = Path(where)
        inside = name.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py")
        if not where.endswith(f"/{inside}") or not (with_pytest or name.partition(".")[0] in _OURS):
            continue  # a second name of another module, or not wanted
        files[inside] = path
        if name in _WHOLE and path.name == "__init__.py":
            files |= {f"{name}/{each.relative_to(path.parent)}": each for each in path.parent.rglob("*.py")}
    for package in {str(Path(name).parent) for name in files} - {
        "."
    }:  # a package that is sent in part needs an __init__.py
        files.setdefault(f"{package}/__init__.py", Path(os.devnull))
    return b"".join(_entry(name, path.read_bytes()) for name, path in sorted(files.items()))


def _entry(name: str, source: bytes) -> bytes:
    path = Path(name)
    compiled = path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"
    # PEP 552: flags 0b01, hash-based and unchecked
    code = importlib.util.MAGIC_NUMBER + struct.pack("<I", 1) + importlib.util.source_hash(source)
    code += marshal.dumps(compile(source, name, "exec", dont_inherit=True))
    return _packed(name, source) + _packed(str(compiled), code)


def _packed(name: str, content: bytes) -> bytes:
    return struct.pack("<HI", len(name.encode()), len(content)) + name.encode() + content
