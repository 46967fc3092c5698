"""The overhead benchmark's recorders, around a real sandbox server."""

from __future__ import annotations

import asyncio

from benchmarks.spans import MeasuredClient, MeasuredSandbox, MeasuredSandboxes, Spans
from envd.types import ToolCall
from resources.sandboxes_config import SandboxesConfig

FILES = {"app.py": b"def one():\n    return 1\n"}
HIDDEN = {"test_hidden.py": b"from app import one\n\n\ndef test_one():\n    assert one() == 1\n"}


def test_tools_and_grading_are_recorded_and_answers_are_untouched() -> None:
    spans = Spans()
    sandboxes = MeasuredSandboxes()
    sandboxes.record_in(spans)

    async def play() -> tuple[str, bytes, str]:
        async with sandboxes.client(SandboxesConfig()) as client:
            assert isinstance(client, MeasuredClient)
            template = await client.put_template(FILES)
            sandbox = await client.create(template)
            assert isinstance(sandbox, MeasuredSandbox)
            (answer,) = await sandbox.batch([ToolCall("read", {"path": "app.py"})])
            diff = await sandbox.finish()
            verdict = await client.verify(template, diff, HIDDEN, ["test_hidden.py::test_one"])
            return answer.text, diff, verdict.outcomes[0].status

    try:
        text, diff, status = asyncio.run(play())
    finally:
        sandboxes.close()
    assert text.startswith("1 def one()") and diff == b"" and status == "passed"
    assert len(spans.intervals["tools"]) == 3 and len(spans.intervals["grading"]) == 1
    assert spans.busy("tools", "grading") > spans.busy("tools") > 0
