"""Checks of torch, GPUs and their number formats, and of the engines and trainers that need them."""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from triplane_dagster.doctor.findings import Check, Finding, ask, broken, missing, ok, trial

ROOT = Path(__file__).resolve().parents[2]
TORCH_S = 120.0
THOROUGH_S = 180.0


def checks(thorough: bool) -> list[Check]:
    """Checks of accelerators. thorough: also import packages that take long to import."""
    limit = THOROUGH_S if thorough else 30.0
    return [
        Check("torch", "policies", torch, required=True, timeout_s=TORCH_S),
        Check("GPU", "models of more than some million parameters", gpu),
        Check("Triton", "kernels on GPUs", package("triton", "`pip install triton`", thorough), timeout_s=limit),
        Check("C compiler", "Triton, which compiles before its first kernel on a GPU", compiler),
        Check("vLLM", "serving large policies; `make test-vllm`", lambda: vllm(thorough), timeout_s=limit),
        Check(
            "DeepSpeed",
            "training on many GPUs: `trainer.launcher.backend: deepspeed`",
            package("deepspeed", "`pip install -e '.[deepspeed]'`", thorough),
            timeout_s=limit,
        ),
        Check(
            "TransformerEngine",
            "FP8 training on GPUs: `trainer.precision.kind: te-float8-block`",
            package("transformer_engine", "`pip install -e '.[te]'`", thorough),
            timeout_s=limit,
        ),
    ]


def torch() -> Finding:
    """Import torch and multiply; name each device and its FP8 units."""
    said = trial("torch_devices", timeout_s=TORCH_S)
    if said.code != 0:
        return broken(said.last_words, "`make install`")
    about: dict[str, Any] = json.loads(said.out.splitlines()[-1])
    devices = [f"{each['name']} {each['memory_gib']} GiB ({each['fp8']})" for each in about["devices"]]
    return ok(f"{about['version']}, " + (", ".join(devices) if devices else "CPU only"))


def gpu() -> Finding:
    """Ask the GPU driver."""
    query = ["--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader"]
    try:
        said = ask(["nvidia-smi", *query])
    except FileNotFoundError:
        return missing("no nvidia-smi in PATH", "an NVIDIA GPU and its driver; the quickstart needs none")
    if said.code != 0:
        return broken(said.last_words, "reinstall the driver, then reboot")
    return ok("; ".join(said.out.split("\n")).strip("; "))


def compiler() -> Finding:
    """Find the C compiler that Triton takes, and compile with Python's headers as it does."""
    fix = "`apt-get install gcc libc6-dev python3-dev`; on Kubernetes the target `trainer` of deploy/Dockerfile"
    program = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if program is None:
        return missing("neither gcc nor clang in PATH, and CC is not set", fix)
    headers = f"-I{sysconfig.get_paths()['include']}"
    try:
        said = ask([program, "-fsyntax-only", headers, "-include", "Python.h", "-x", "c", os.devnull])
    except FileNotFoundError:
        return broken(f"CC={program} is no program", fix)
    return ok(program) if said.code == 0 else broken(f"{program} fails: {said.last_words}", fix)


def package(name: str, fix: str, thorough: bool) -> Callable[[], Finding]:
    """Check of a Python package: its version and, if requested, whether it can be imported."""

    def look() -> Finding:
        return _package(Path(sys.executable), name, fix, thorough)

    return look


def vllm(thorough: bool) -> Finding:
    """Find vLLM in this environment, or in a separate one beside the code."""
    own = ROOT / ".venv-vllm" / "bin" / "python"
    here = _package(Path(sys.executable), "vllm", "`pip install -e '.[vllm]'` on a machine with GPUs", thorough)
    if here.state != "missing" or not own.is_file():
        return here
    found = _package(own, "vllm", f"install it anew in {own.parents[1]}", thorough)
    return Finding(found.state, f"{found.found} in {own.parents[1].name}", found.fix)


_ASK = """
import importlib, importlib.metadata, importlib.util, sys
name = sys.argv[1]
if importlib.util.find_spec(name) is None: sys.exit(3)
if sys.argv[2] == "thorough": importlib.import_module(name)
names = importlib.metadata.packages_distributions().get(name, [name])
print(names[0], importlib.metadata.version(names[0]))
"""


def _package(python: Path, name: str, fix: str, thorough: bool) -> Finding:
    if not thorough and python == Path(sys.executable):
        return _installed(name, fix)
    said = ask([str(python), "-c", _ASK, name, "thorough" if thorough else "quick"], THOROUGH_S)
    if said.code == 3:
        return missing("not installed", fix)
    if said.code != 0:
        return broken(said.last_words, fix)
    return ok(said.out.strip().splitlines()[-1] + (", imported" if thorough else ", installed"))


def _installed(name: str, fix: str) -> Finding:
    try:
        return ok(f"{name} {metadata.version(name)}, installed")
    except metadata.PackageNotFoundError:
        return missing("not installed", fix)
