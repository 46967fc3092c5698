"""`python -m triplane_dagster.doctor.trials.instance`: open Dagster's instance as a run would, and print what it is.

If none exists yet, it is opened in a temporary folder, so that the check does not create one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from dagster import DagsterError

from triplane_dagster.run import open_instance


def main() -> int:
    """Print one JSON object on stdout."""
    here = Path.cwd()
    exists = bool(os.environ.get("DAGSTER_HOME")) or (here / ".triplane" / "dagster").is_dir()
    with tempfile.TemporaryDirectory() as elsewhere:
        if not exists:
            os.chdir(elsewhere)
        try:
            with open_instance(here) as instance:
                statuses = instance.get_daemon_statuses()
                about = {
                    "storage": type(instance.run_storage).__name__,
                    "place": os.environ.get("DAGSTER_HOME") or (str(here / ".triplane/dagster") if exists else "new"),
                    "healthy": sorted(name.lower() for name, status in statuses.items() if status.healthy),
                }
        except (DagsterError, OSError) as error:
            print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
            return 1
        finally:
            os.chdir(here)
    print(json.dumps(about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
