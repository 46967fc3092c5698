"""Decide from a failed training's pods if it may be restarted, and say why it ended.

A pod that failed for a reason of its own decides: its training fails, and no restart would help. Else the training is
restarted: a pod was evicted, preempted, deleted or killed, or its node is lost, and other pods ended because of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from signal import Signals

from resources.kubernetes.watching import PodRecord, Watched
from resources.launch import Launch
from trainer.errors import DIVERGED_STATUS, LAST_WORDS

_MALFORMED_STATUS = 2
_NOT_STARTED = ("StartError", "ContainerCannotRun")


@dataclass(frozen=True)
class Ending:
    """How a Job ended."""

    words: str = ""
    """Why it failed; empty: it did not."""
    restart: bool = False
    """Whether another attempt may succeed."""


DONE = Ending()


def ending_of(watched: Watched, launch: Launch, *, patient: bool) -> Ending | None:
    """How the Job ended, or None if it has not, or if more must be seen to tell.

    patient: wait for a pod's own reason while others only lost it.
    """
    if watched.complete:
        return DONE
    failed, first = watched.failed, watched.first_signs
    own = [record for record in first if record.sign == "failed"]
    if own:
        return Ending(_own_reason(own[0], launch))
    if failed is not None and failed.get("reason") == "DeadlineExceeded":
        return Ending(
            f"it took longer than {launch.timeout_s:g} s: raise trainer.launcher.timeout_s; the next run continues from"
            " the last snapshot"
        )
    causes = [record for record in first if record.sign != "lost"]
    if causes:
        return Ending(_disruption(causes[0]), restart=True)
    if not first and failed is None:
        return None
    if patient and not watched.settled:
        return None
    if first:
        return Ending(f"pod {first[0].name}: {_last_words(first[0])}", restart=True)
    assert failed is not None
    gone = "its pods are gone" if not watched.pods else failed.get("message", "")
    return Ending(f"{failed.get('reason', 'the Job failed')}: {gone}", restart=True)


def _own_reason(record: PodRecord, launch: Launch) -> str:
    ended = record.ended or {}
    if ended.get("reason") == "OOMKilled":
        return (
            f"pod {record.name} needed more than its memory limit of {launch.placement.memory} (OOMKilled): raise"
            " placement.trainer.memory, or use more nodes or smaller microbatches"
        )
    if ended.get("reason") in _NOT_STARTED:
        return f"pod {record.name} can't start its command ({ended.get('message', 'no reason given')}): check image"
    what = {_MALFORMED_STATUS: "the job is malformed", DIVERGED_STATUS: "training diverged"}.get(record.status or 1)
    status = what or f"ended with code {record.status}"
    return f"pod {record.name}: {status}: {_last_words(record)}"


def _disruption(record: PodRecord) -> str:
    place = f" on node {record.node}" if record.node else ""
    if record.disruption is not None:
        said = record.disruption
        return f"pod {record.name}{place} was disrupted ({said.get('reason', '')}: {said.get('message', '')})"
    status = record.status or 0
    if record.sign == "killed":
        name = Signals(status - 128).name if status - 128 in list(Signals) else f"status {status}"
        return f"pod {record.name}{place} was killed ({name})"
    if record.sign == "disrupted":
        status_of = record.pod["status"]
        return f"pod {record.name}{place} failed ({status_of.get('reason', '')}: {status_of.get('message', '')})"
    return f"pod {record.name}{place} was deleted"


def _last_words(record: PodRecord) -> str:
    """The trainer's last words, else the end of its log."""
    message = str((record.ended or {}).get("message") or "")
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith(LAST_WORDS):
            return line
    return " | ".join(lines[-5:])[-1000:] or "no output"
