"""`python -m envd policy FILE`: whether sandbox rules are valid, and what they mean with everything they leave out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from contracts.errors import describe
from envd.errors import EnvdError
from envd.server.rules import load_rules


def run_check(argv: Sequence[str]) -> int:
    """Run the command and return its exit code: 1 for rules that are not valid."""
    parser = argparse.ArgumentParser(prog="python -m envd policy", description="Check a file of sandbox rules.")
    parser.add_argument("file", type=Path, help="the rules, as docs/sandboxes-rules.md shows")
    parser.add_argument(
        "--under", type=Path, metavar="FILE", help="the server's rules, which a request's rules can only tighten"
    )
    arguments = parser.parse_args(argv)
    try:
        rules = load_rules(_text(arguments.file))
        if arguments.under is not None:
            rules, denials = rules.under(load_rules(_text(arguments.under)))
            if denials:
                raise EnvdError("; ".join(map(str, denials)))
    except EnvdError as error:
        print(f"envd: {error}", file=sys.stderr)
        return 1
    print(json.dumps(rules.model_dump(mode="json"), indent=2))
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = describe(error) if isinstance(error, OSError) else f"{path}: {error}"
        raise EnvdError(f"the sandbox rules can't be read: {reason}") from error
