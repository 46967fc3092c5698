"""Runs the Python agent by itself: python -m envd.guest (--fd N | --stdio) --workspace DIR --scratch DIR."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from envd.guest.agent import Agent
from envd.sandbox import linux


def main() -> None:
    """Serve one stream until it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    stream = parser.add_mutually_exclusive_group(required=True)
    stream.add_argument("--fd", type=int)
    stream.add_argument("--stdio", action="store_true")
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    arguments = parser.parse_args()
    linux.adopt_orphans()
    reading, writing = (0, 1) if arguments.stdio else (arguments.fd, arguments.fd)
    if arguments.stdio:
        reading, writing = os.dup(0), os.dup(1)
        null = os.open("/dev/null", os.O_RDWR)
        for number in (0, 1):
            os.dup2(null, number)
        os.close(null)
    for fd in (reading, writing):
        os.set_inheritable(fd, False)
    arguments.scratch.mkdir(mode=0o700, exist_ok=True)
    workspace, scratch = arguments.workspace.resolve(), arguments.scratch.resolve()
    Agent(reading, writing, workspace=workspace, scratch=scratch).serve()


if __name__ == "__main__":
    main()
