"""Opening the store removes what a killed launcher left in the folder for temporary files."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from resources.pipes import open_channel
from resources.store import StoreResource

KILLED = """
import os, signal, tempfile, sys
tempfile.tempdir = sys.argv[1]
from resources.pipes import open_channel
with open_channel(""):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_launchers_folder_goes_and_a_live_ones_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", KILLED, str(temporary)], cwd=root, check=False, timeout=60)
    assert len(list(temporary.iterdir())) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with open_channel(""):
        (live,) = temporary.iterdir()
        subprocess.run([sys.executable, "-c", KILLED, str(temporary)], cwd=root, check=False, timeout=60)
        assert len(list(temporary.iterdir())) == 2
        monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
        StoreResource().open()
        assert list(temporary.iterdir()) == [live]
