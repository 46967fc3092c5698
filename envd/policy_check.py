"""`python -m envd policy FILE`: whether a policy is valid, and what it means with everything it leaves out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from contracts.errors import describe
from envd.errors import EnvdError
from envd.server.policy import load_policy


def run_policy(argv: Sequence[str]) -> int:
    """Run the command and return its exit code: 1 for a policy that is not valid."""
    parser = argparse.ArgumentParser(prog="python -m envd policy", description="Check a policy file.")
    parser.add_argument("file", type=Path, help="the policy, as docs/policies.md shows")
    parser.add_argument("--under", type=Path, metavar="FILE", help="the server's policy that a request's comes under")
    arguments = parser.parse_args(argv)
    try:
        policy = load_policy(_text(arguments.file))
        if arguments.under is not None:
            policy, denials = policy.under(load_policy(_text(arguments.under)))
            if denials:
                raise EnvdError("; ".join(map(str, denials)))
    except EnvdError as error:
        print(f"envd: {error}", file=sys.stderr)
        return 1
    print(json.dumps(policy.model_dump(mode="json"), indent=2))
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeError) as error:
        reason = describe(error) if isinstance(error, OSError) else f"{path}: {error}"
        raise EnvdError(f"the policy can't be read: {reason}") from error
