"""Launch training processes on this machine: start, watch and reap them."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import dagster as dg
from pydantic import Field

from contracts import tracing
from resources.channel import PIPES_BUCKET
from resources.errors import LaunchFailed, LaunchKilled
from resources.gpus import VISIBLE, local_gpus
from resources.launch import Context, Launch, OnMessage
from resources.pipes import open_channel
from trainer.errors import LAST_WORDS, RANKS_LOST_STATUS
from trainer.lifetime import PARENT_VARIABLE

_TAIL_LINES, _SHOWN = 15, 60


class LocalLauncher(dg.ConfigurableResource[Any]):
    """Runs a command as a child process of this machine.

    A command that observes `PARENT_VARIABLE`, as the trainer does, exits with its parent.
    """

    grace_s: float = Field(default=5.0, gt=0, description="Seconds between SIGTERM and SIGKILL")
    poll_s: float = Field(default=0.1, gt=0, description="Polling interval for messages, in seconds")
    pipes_bucket: str = Field(
        default="",
        description=f"S3 bucket through which a child reports; empty: ${PIPES_BUCKET}, else a file of this machine",
    )

    def run(self, context: Context, launch: Launch, on_message: OnMessage) -> list[Mapping[str, Any]]:
        """See Launcher.run."""
        command, timeout_s = launch.command, launch.timeout_s
        refusal = local_refusal(launch.nodes, launch.gpus)
        if refusal is not None:
            raise LaunchFailed(refusal)
        seen, deadline = 0, time.monotonic() + timeout_s
        with (
            tempfile.TemporaryFile() as log,
            open_channel(self.pipes_bucket) as channel,
            dg.open_pipes_session(
                context=context, context_injector=channel.injector, message_reader=channel.reader
            ) as session,
        ):
            child = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    **session.get_bootstrap_env_vars(),
                    **tracing.environment(),
                    PARENT_VARIABLE: str(os.getpid()),
                },
            )
            try:
                while True:
                    ended = _ended(child, self.poll_s)
                    messages = session.get_custom_messages()
                    for message in messages[seen:]:
                        on_message(message)
                    seen = len(messages)
                    if ended:
                        break
                    if time.monotonic() > deadline:
                        raise LaunchFailed(
                            f"`{_shown(command)}` took longer than {timeout_s:g} s: raise trainer.launcher.timeout_s;"
                            " the next run continues from its last snapshot"
                        )
            finally:
                _stop(child, self.grace_s)
                channel.ended()
            tail = _tail(log)
        _require_success(child.returncode, _shown(command), tail)
        messages = session.get_custom_messages()
        for message in messages[seen:]:
            on_message(message)
        return list(messages)


def local_refusal(nodes: int, gpus: int) -> str | None:
    """Why the local launcher can't run this many nodes or GPUs, or None."""
    if nodes != 1:
        return (
            f"trainer.launcher.nodes={nodes}: the local launcher uses one machine; set it to 1, or"
            " trainer.launcher.kind to kubernetes"
        )
    found = len(local_gpus()) if gpus else 0
    if gpus > found:
        return (
            f"trainer.launcher.gpus={gpus}: this machine has {found} NVIDIA GPU(s), as nvidia-smi and ${VISIBLE} tell;"
            f" set it to {found}{'' if found else ', which trains on the CPU'}"
        )
    return None


def _ended(child: subprocess.Popen[bytes], wait_s: float) -> bool:
    try:
        child.wait(wait_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _stop(child: subprocess.Popen[bytes], grace_s: float) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        if not _ended(child, grace_s):
            child.kill()
            child.wait()


def _require_success(status: int, command: str, tail: str) -> None:
    """Raise LaunchKilled if a signal ended the command or one of its ranks, LaunchFailed if it failed otherwise."""
    if status < 0:
        raise LaunchKilled(f"`{command}` was killed ({signal.Signals(-status).name}): {tail}")
    if status == RANKS_LOST_STATUS or status > 128:
        raise LaunchKilled(f"`{command}` was killed or lost a rank (code {status}): {tail}")
    if status:
        raise LaunchFailed(f"`{command}` ended with code {status}: {tail}")


def _tail(log: IO[bytes]) -> str:
    """Last error that the program reported, else its last lines."""
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    if lines and lines[-1].startswith(LAST_WORDS):
        return lines[-1]
    return " | ".join(line.strip() for line in lines[-_TAIL_LINES:] if line.strip())[-2000:] or "no output"


def _shown(command: Sequence[str]) -> str:
    shown = " ".join([Path(command[0]).name, *command[1:]])
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
