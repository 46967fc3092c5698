"""Candidates a second of the factory's screen, which runs in sandboxes, and of others on the same modules and tests.

    processes    one pytest process for each candidate, with its covering tests, in a sandbox each
    cosmic-ray   its local distributor: the file is changed, and a process runs all tests until one fails
    mutmut       forks of one process that has imported all versions of each function, without a sandbox

Each has all cores if it can use them; cosmic-ray runs one mutant after the other. Rates are of the runs alone: what is
prepared once (baseline, coverage, generated mutants) is left out, for mutmut by its own count.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks.measure import median
from benchmarks.result import NotHereError, Options, Result
from contracts.errors import TriplaneError
from contracts.store import Store, open_store
from curation.tasks.factory.baseline import run_baseline
from curation.tasks.factory.environment import surroundings_of
from curation.tasks.factory.functions import product_sources
from curation.tasks.factory.guest import Guest
from curation.tasks.factory.make import MakeConfig, covered_functions, draw
from curation.tasks.factory.screen import screen
from curation.tasks.factory.source import Repository, read_repository
from curation.tasks.factory.strategies import Candidate, Context, strategy_named
from envd.client import SandboxClient, ToolCall
from envd.local import TRUSTED, LocalEnvd

_MUTMUT_S = 1800.0


class ScreenOptions(Options):
    """Options of the `screen` benchmark."""

    package: str = "toolz==1.0.0"
    """Pinned package whose source distribution holds tests, with its modules in a folder at the top."""
    candidates: int = Field(500, ge=1)
    """Candidates screened."""
    compared: int = Field(40, ge=1)
    """Candidates of these that also run in one process each."""
    repeats: int = Field(3, ge=1)
    """Rounds of the screen and of processes, in turn; rates are medians."""
    seconds: float = Field(60, gt=0)
    """Time that cosmic-ray gets."""
    broken: str = "toolz/tests/test_curried.py::test_curried_namespace"
    """Test that fails because mutmut adds names to modules. mutmut runs without it."""
    peers: str = ".venv-peers/bin"
    """Folder with mutmut and cosmic-ray, which `make test-peers` installs; empty: measure without them."""


OPTIONS = ScreenOptions


def run(options: ScreenOptions) -> Result:
    """Screen, then let the peers run the same modules' mutants."""
    missing = [name for name in ("mutmut", "cosmic-ray") if not (Path(options.peers) / name).exists()]
    if options.peers and missing:
        raise NotHereError(
            f"{options.peers} lacks {missing[0]}: make test-peers installs it; --peers= measures without"
        )
    with tempfile.TemporaryDirectory(prefix="bench-screen-") as scratch, LocalEnvd(rules=TRUSTED) as envd:
        store = open_store(scratch + "/store")
        repository = read_repository(f"pypi:{options.package}", store)
        rates, modules, tests = asyncio.run(_ours(options, repository, store, envd.address))
        if options.peers:
            bin_, folder = Path(options.peers).absolute(), Path(scratch)
            rates["cosmic_ray"] = _cosmic_ray(bin_, _written(repository, folder / "c"), modules, tests, options.seconds)
            rates["mutmut"] = _mutmut(bin_, _written(repository, folder / "m"), modules, tests, options.broken)
    metrics = {f"{name}_per_second": rate for name, rate in rates.items()}
    metrics |= {f"over_{name}": rates["screen"] / rate for name, rate in rates.items() if name != "screen"}
    return Result(metrics, judged=bool(options.peers))


async def _ours(
    options: ScreenOptions, repository: Repository, store: Store, address: str
) -> tuple[dict[str, float], list[str], list[str]]:
    """Rates of the screen and of processes; the modules that candidates change, and the files of their tests."""
    async with SandboxClient(address) as client:
        guest = Guest(client, repository.tree, surroundings_of(repository, store))
        baseline = await run_baseline(repository, guest, store)
        functions = covered_functions(product_sources(repository.tree)[0], baseline)
        context = Context(repository, functions, baseline.lines, 0, most=options.candidates)
        candidates = draw(list(strategy_named("mutate")(context)), MakeConfig(options.candidates))
        candidates = candidates[: options.candidates]
        few = candidates[:: max(1, len(candidates) // options.compared)][: options.compared]
        rates: dict[str, list[float]] = {"screen": [], "processes": []}
        covering: dict[str, Sequence[str]] = {}
        for number in range(options.repeats):
            # results are kept by store, so that each round has its own
            with tempfile.TemporaryDirectory(prefix=f"bench-screen-{number}-") as fresh:
                began = time.perf_counter()
                keys = {each.key: each for each in functions}
                found = await screen(candidates, keys, baseline, guest, open_store(fresh))
                rates["screen"].append(len(candidates) / (time.perf_counter() - began))
            covering |= {each.candidate.identity: each.covering for each in found.kept}
            slots = asyncio.Semaphore(os.cpu_count() or 1)
            tests = [sorted(covering.get(each.identity, list(baseline.good)[:1])) for each in few]
            began = time.perf_counter()
            await asyncio.gather(
                *(_one_process(repository, each, names, client, slots) for each, names in zip(few, tests, strict=True))
            )
            rates["processes"].append(len(few) / (time.perf_counter() - began))
    files = {name.split("::", 1)[0] for name in baseline.good}
    modules = {each.path for each in candidates}
    return {name: median(values) for name, values in rates.items()}, sorted(modules), sorted(files)


async def _one_process(
    repository: Repository, candidate: Candidate, tests: Sequence[str], client: SandboxClient, slots: asyncio.Semaphore
) -> None:
    command = f"python -m pytest -q -p no:cacheprovider --import-mode=importlib {shlex.join(tests)}"
    async with slots, await client.create(await client.put_template(candidate.apply(repository.tree))) as sandbox:
        await sandbox.call(ToolCall("exec", {"command": command, "timeout_s": 120}), timeout_s=120)


def _written(repository: Repository, folder: Path) -> Path:
    for path, content in repository.tree.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def _cosmic_ray(peers: Path, folder: Path, modules: Sequence[str], tests: Sequence[str], seconds: float) -> float:
    command = f"timeout -s KILL 20 {peers / 'python'} -m pytest -x -q -p no:cacheprovider {shlex.join(tests)}"
    listed = ", ".join(f'"{each}"' for each in modules)
    (folder / "cosmic.toml").write_text(
        f'[cosmic-ray]\nmodule-path = [{listed}]\ntimeout = 20.0\nexcluded-modules = []\ntest-command = "{command}"\n'
        '[cosmic-ray.distributor]\nname = "local"\n'
    )
    arguments = [str(peers / "cosmic-ray"), "exec", "cosmic.toml", "session.sqlite"]
    _tell([*arguments[:1], "init", *arguments[2:]], folder, seconds + 120)
    began = time.perf_counter()
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with (
        subprocess.Popen(arguments, cwd=folder, **quiet) as process,
        contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError),
    ):
        try:
            process.wait(seconds)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    took = time.perf_counter() - began
    with sqlite3.connect(folder / "session.sqlite") as session:
        (count,) = session.execute("select count(*) from work_results").fetchone()
    return _rate("cosmic-ray", count / took)


def _mutmut(peers: Path, folder: Path, modules: Sequence[str], tests: Sequence[str], broken: str) -> float:
    copied = sorted({each.name for each in folder.iterdir()} - {"setup.cfg"})
    settings: Mapping[str, Sequence[str]] = {
        "source_paths": modules,
        "also_copy": copied,
        "pytest_add_cli_args_test_selection": tests,
        "pytest_add_cli_args": ["--deselect", broken] if broken else [],
    }
    with (folder / "setup.cfg").open("a") as file:
        file.write("\n[mutmut]\n" + "".join(f"{key} =\n" + _indented(values) for key, values in settings.items()))
    said = _tell([str(peers / "mutmut"), "run"], folder, _MUTMUT_S)
    found = re.findall(r"([\d.]+) mutations/second", said)
    return _rate("mutmut", float(found[-1]) if found else 0.0, said)


def _indented(values: Sequence[str]) -> str:
    return "".join(f"    {each}\n" for each in values)


def _tell(command: Sequence[str], folder: Path, seconds: float) -> str:
    environment: dict[str, Any] = {**os.environ, "PATH": f"{Path(command[0]).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode:
        said = (done.stderr or done.stdout)[-500:].strip()
        raise TriplaneError(f"{Path(command[0]).name} ended with status {done.returncode}: {said}")
    return done.stdout


def _rate(name: str, rate: float, said: str = "") -> float:
    if not rate:
        raise TriplaneError(f"{name} ran no mutant: {said[-500:]}")
    return rate
