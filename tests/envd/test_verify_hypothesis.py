"""What envd keeps for Hypothesis, whose tables a fresh sandbox lacks."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import sys
from envd.sandbox.runner import _keep_table_of_utf8
_keep_table_of_utf8()
from hypothesis.internal.charmap import charmap_file
print(charmap_file("codec-v2-utf-8"), charmap_file("codec-utf-8"))
"""


def _is_encodable(number: int) -> bool:
    try:
        chr(number).encode()
    except UnicodeEncodeError:
        return False
    return True


def test_the_table_of_utf8_is_the_one_that_hypothesis_computes(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "HYPOTHESIS_STORAGE_DIRECTORY"}
    environment |= {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, check=True, capture_output=True, text=True)
    newer, older = map(Path, done.stdout.split())
    encodable, others = json.loads(gzip.decompress(newer.read_bytes()))
    assert others == [] and json.loads(gzip.decompress(older.read_bytes())) == encodable
    inside = {number for first, last in encodable for number in range(first, last + 1)}
    assert inside == set(filter(_is_encodable, range(sys.maxunicode + 1)))
