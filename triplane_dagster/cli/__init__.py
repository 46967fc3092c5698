"""The `triplane` command. It shares store and asset graph with the Dagster UI.

In: arguments, experiments/*.yaml, a store. Out: tables, `--json` for programs, one-line errors on stderr. Modules: one
per command; `app` registers them, `output` prints, `options` defines shared options, `history` reads the results of
iterations, `transcript` renders episodes, `bars` shows progress. Commands import torch and dagster themselves, so
`--help` is quick.

Imported by nothing but benchmarks, which reads `history`. May import every package of this repository.
"""

from __future__ import annotations

import codecs
import locale
import os
import sys
from pathlib import Path

_UTF8 = "PYTHONUTF8"


def main() -> None:
    """Entry point of the `triplane` script. Files and outputs are UTF-8, also in a locale that is not."""
    again = False
    for standard in range(3):
        try:
            os.fstat(standard)
        except OSError:  # closed by the caller: the first file that is opened would get its number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            again = True
    if codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8" and os.environ.get(_UTF8) != "1":
        os.environ[_UTF8] = "1"  # read by Python as it starts, and by the processes that it starts
        again = True
    if again:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    try:
        Path.cwd()
    except FileNotFoundError:
        sys.exit("error: the working directory was removed: change to one that exists, then run the same command again")
    try:
        from triplane_dagster.cli.app import app
    except KeyboardInterrupt:
        print("\ninterrupted (SIGINT): nothing was begun", file=sys.stderr)
        sys.exit(130)

    app(prog_name="triplane")
