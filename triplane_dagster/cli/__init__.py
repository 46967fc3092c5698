"""The `triplane` command. It works on the same store and the same asset graph as the Dagster UI.

In: arguments, experiments/*.yaml, a store. Out: tables for people, `--json` for programs, one-line errors on stderr.
Modules: one a command; `app` registers them, `output` prints, `options` names the options that commands share,
`history` reads what iterations achieved, `transcript` renders episodes, `bars` shows progress. Heavy imports (torch,
dagster) happen inside commands, so `--help` is quick.

Imported by nothing but benchmarks, which reads `history`. May import every package of this repository.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the `triplane` script."""
    from triplane_dagster.cli.app import app

    app(prog_name="triplane")
