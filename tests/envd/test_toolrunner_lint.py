"""The lint tool: real linters run in the sandbox, on the files below a path."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from envd.guest.link import GuestLink
from envd.server import linting
from envd.server.toolrunner import run_batch
from envd.tools.linters import bash_findings, column_findings, linter_of, node_findings
from envd.types import ToolCall, ToolResult
from tests.envd.agents import with_agent

FILES = {
    "good.py": "x = 1\n",
    "bad.py": "import os\nx = undefined\n",
    "sub/syntax.py": "def f(:\n    pass\n",
    "run.sh": "if true; then\n  echo\n",
    "ok.sh": "echo fine\n",
    "notes.md": "no linter\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, content in FILES.items():
        (tmp_path / "workspace" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "workspace" / path).write_text(content)
    return tmp_path / "workspace"


def linted(root: Path, **arguments: object) -> ToolResult:
    async def job(guest: GuestLink) -> list[ToolResult]:
        return await run_batch(guest, [ToolCall("lint", arguments)], 30)

    return with_agent(root, job)[0]


def test_findings_are_told_by_place(root: Path) -> None:
    result = linted(root)
    lines = result.text.split("\n")
    assert result.ok and lines == sorted(lines)
    assert {"bad.py:1:8: F401 `os` imported but unused", "bad.py:2:5: F821 Undefined name `undefined`"} <= {*lines}
    assert any(line.startswith("run.sh:3:1: syntax error") for line in lines)
    assert any(line.startswith("sub/syntax.py:1:7: invalid-syntax ") for line in lines)
    assert not any("good.py" in line or "ok.sh" in line or "notes.md" in line for line in lines)
    assert linted(root, path="/workspace/good.py").text == "no problems"
    assert linted(root, path="sub").text.startswith("sub/syntax.py:1:7: ")


def test_what_has_no_linter_and_what_is_not_there_is_said(root: Path) -> None:
    assert linted(root, path="notes.md").text.startswith("error: no linter for notes.md: there are some for .py .pyi ")
    assert linted(root, path="gone").text == "error: no such file: gone"
    assert linted(root, colour=1).text == "error: lint: unknown argument: colour"


def test_a_linter_that_the_sandbox_lacks_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = linting.candidates
    monkeypatch.setattr(linting, "candidates", lambda name: ["/nowhere/ruff"] if name == "ruff" else real(name))
    lines = linted(root).text.split("\n")
    assert lines[-1] == "not looked at: 3 files for ruff, which is not in the sandbox"
    assert lines[0].startswith("run.sh:3:1: ")


def test_configuration_of_the_workspace_counts_and_can_not_break_the_tool(root: Path) -> None:
    (root / "ruff.toml").write_text('lint.ignore = ["F401"]\n')
    assert not any("F401" in line for line in linted(root).text.split("\n"))
    (root / "ruff.toml").write_text("this is no toml\n")
    result = linted(root)
    assert not result.ok and result.text.startswith("error: ruff failed: ") and "\n" not in result.text


def test_words_of_each_linter_become_findings() -> None:
    assert [str(each) for each in bash_findings(b"", b"./a b.sh: line 3: syntax error: unexpected end of file\n")] == [
        "./a b.sh:3:1: syntax error: unexpected end of file"
    ]
    assert [
        str(each) for each in column_findings(b"x.go\n", b"./x.go:3:5: expected ';'\n./x.c:2:1: warning: unused\n")
    ] == [
        "./x.go:3:5: expected ';'",
        "./x.c:2:1: unused",
    ]
    said = b"/w/x.js:1\nlet = ;\n    ^\n\nSyntaxError: Unexpected token ';'\n    at wrapSafe\n"
    assert [str(each) for each in node_findings(b"", said)] == ["/w/x.js:1:1: SyntaxError: Unexpected token ';'"]
    assert linter_of("a.pyi") is not None and linter_of("Makefile") is None


@pytest.mark.parametrize(
    ("name", "content", "words"), [("x.c", "int f( {\n", "x.c:1:"), ("x.js", "let = ;\n", "x.js:1:1: SyntaxError")]
)
def test_other_languages(tmp_path: Path, name: str, content: str, words: str) -> None:
    program = {"x.c": "cc", "x.js": "node"}[name]
    if shutil.which(program, path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip(f"{program} is not on this machine")
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / name).write_text(content)
    assert linted(tmp_path / "workspace").text.startswith(words)
