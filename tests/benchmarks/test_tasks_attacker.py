"""The program that looks for solutions finds what lies around, and gives what it finds to the verifier."""

from __future__ import annotations

import asyncio
import io
import marshal
import zipfile

import pytest

from benchmarks.tasks import Searcher
from contracts.tasks import Split, Task
from curation.tasks.agents import play_suite
from curation.tasks.bugs import file_diff
from curation.verify import Verifier
from envd.client import SandboxClient
from envd.local import TRUSTED, LocalEnvd

pytestmark = pytest.mark.slow
FIXED = "class Words:\n    def double(self, n):\n        return n * 2\n\n\nVALUE = 3\n"
BROKEN = FIXED.replace("n * 2", "n + 2")
TEST = "from pack import Words\n\n\ndef test_double():\n    assert Words().double(5) == 10\n"
COMPILED = b"\0" * 16 + marshal.dumps(compile(FIXED, "pack.py", "exec"))


def archive(text: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as out:
        out.writestr("pack.py", text)
    return data.getvalue()


@pytest.fixture(scope="module")
def trusted() -> object:
    with LocalEnvd(rules=TRUSTED) as envd:
        yield envd.address


@pytest.mark.parametrize(
    ("left", "solved"),
    [
        ({}, False),
        ({"notes/pack.py.orig": FIXED.encode()}, True),
        ({"build/pack.whl": archive(FIXED)}, True),
        ({"cache/pack.cpython-311.pyc": COMPILED}, False),
        ({"notes/pack.py.orig": BROKEN.encode()}, False),
    ],
    ids=["nothing", "source", "archive", "byte code", "the bug itself"],
)
def test_solutions_that_lie_around_are_found(left: dict[str, bytes], solved: bool, trusted: str) -> None:
    task = Task(
        task_id="words",
        family="double",
        split=Split.TRAIN,
        instruction="mend double",
        files={"pack.py": BROKEN.encode(), **left},
        hidden_files={"test_words.py": TEST.encode()},
        tests=("test_words.py::test_double",),
        reference_diff=file_diff("pack.py", BROKEN, FIXED),
        meta={"path": "pack.py", "function": "pack.py::Words.double"},
    )

    async def play() -> tuple[bytes, bool]:
        async with SandboxClient(trusted) as client:
            (played,) = await play_suite([task], Searcher(), client, Verifier(client, None))
            return played.diff, played.verdict.solved

    diff, found = asyncio.run(play())
    assert found == solved
    assert bool(diff) == (solved or COMPILED in left.values())
