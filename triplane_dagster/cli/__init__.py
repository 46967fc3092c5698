"""The `triplane` command. It shares store and asset graph with the Dagster UI.

In: arguments, experiments/*.yaml, a store. Out: tables, `--json` for programs, one-line errors on stderr. Modules: one
per command; `app` registers them, `output` prints, `options` defines shared options, `history` reads the results of
iterations, `transcript` renders episodes, `bars` shows progress. Commands import torch and dagster themselves, so
`--help` is quick.

Imported by nothing but benchmarks, which reads `history`. May import every package of this repository.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the `triplane` script."""
    from triplane_dagster.cli.app import app

    app(prog_name="triplane")
