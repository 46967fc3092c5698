"""What docs/sandboxes.md tells a newcomer to write is run as it stands there, and its commands have the options that it
shows.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from envd.__main__ import main
from tests.envd.harness import Harness

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "sandboxes.md").read_text()


def test_the_guides_program_runs(namespaces: Harness) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert "unix:/tmp/envd.sock" in program
    here = program.replace("unix:/tmp/envd.sock", namespaces.address)
    exec(compile(here, "docs/sandboxes.md", "exec"), {})


@pytest.mark.parametrize("command", ["serve", "top", "mcp"])
def test_the_guides_commands_have_the_options_that_it_shows(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    known = capsys.readouterr().out
    shown = re.findall(rf"python -m envd {command}([^\n`#]*)", GUIDE)
    assert shown
    assert not [option for rest in shown for option in re.findall(r"--[a-z-]+", rest) if option not in known]
