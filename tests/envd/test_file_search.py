"""Files.Search: ripgrep's behaviour, and the same from plain Python where a sandbox has no ripgrep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.pb import envd_operations_pb2 as pb
from envd.errors import EnvdError
from envd.guest.link import GuestLink
from envd.server.operations import filesearch
from envd.server.operations.filesearch import search_files
from tests.envd.agents import with_agent

TREE = {
    ".gitignore": "*.log\n!keep.log\n/build/\nsub/only\n# no\ntrail \n\\#odd\n**/deep/x\nd?c\n[ab].txt\n",
    "a.py": "import os\nneedle = 1\n",
    "b.log": "needle\n",
    "keep.log": "needle\n",
    "build/out": "needle\n",
    "nested/build/out": "needle\n",
    "sub/only": "needle\n",
    "other/sub/only": "needle\n",
    "trail": "needle\n",
    "#odd": "needle\n",
    "p/q/deep/x": "needle\n",
    "p/q/deep/y": "Needle NEEDLE\n",
    "doc": "needle\n",
    "a.txt": "needle\n",
    "c.txt": "x needle needle\r\n",
    ".hidden/f": "needle\n",
    ".dot": "needle\n",
    "bin": "needle\0\nneedle\n",
    "nested/.ignore": "*\n!*.md\n",
    "nested/r.md": "needle\n",
    "nested/r.rst": "needle\n",
    "(?x)/f": "a+b needle\n",
    "empty": "",
    "lines": "\n\nneedle",
    "\u00e9/\u4e16": "\u00e9 needle\n",
}
QUERIES: list[dict[str, Any]] = [
    {"pattern": "needle"},
    {"pattern": "needle", "hidden": True, "globs": ["!.git"]},
    {"pattern": "needle", "path": "nested"},
    {"pattern": "needle", "path": "p/q"},
    {"pattern": "needle", "path": "a.py"},
    {"pattern": "needle", "path": ".hidden"},
    {"pattern": "needle", "ignore_case": True},
    {"pattern": "NEEDLE", "ignore_case": True, "globs": ["*.py", "*.md"]},
    {"pattern": "needle", "globs": ["!*.py", "!p/"]},
    {"pattern": "needle", "globs": ["*.log"]},
    {"pattern": "needle", "globs": ["p/**/y", "**/*.rst"]},
    {"pattern": "needle", "globs": ["[!a].txt"]},
    {"pattern": "a+b", "fixed_string": True},
    {"pattern": r"^$"},
    {"pattern": r"e{2}d|os$"},
    {"pattern": "nowhere"},
    {"pattern": "needle", "limit": 3},
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    workspace = tmp_path / "workspace"
    for path, content in TREE.items():
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace / path).write_bytes(content.encode())
    (workspace / "to-a.py").symlink_to("a.py")
    (workspace / "to-p").symlink_to("p")
    return workspace


def searched(root: Path, *queries: dict[str, Any]) -> list[pb.FileSearchReply]:
    async def job(guest: GuestLink) -> list[pb.FileSearchReply]:
        return [await search_files(guest, pb.FileSearchRequest(**query)) for query in queries]

    return with_agent(root, job)


@pytest.mark.slow
def test_plain_python_finds_what_ripgrep_finds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ripgrep = searched(root, *QUERIES)
    monkeypatch.setattr(filesearch, "candidates", lambda name: [] if name == "rg" else ["python3"])
    python = searched(root, *QUERIES)
    for query, one, other in zip(QUERIES, ripgrep, python, strict=True):
        assert (one.engine, other.engine) == ("ripgrep", "python")
        assert [str(match) for match in other.matches] == [str(match) for match in one.matches], query
        assert one.truncated == other.truncated == ("limit" in query)
    assert [match.path for match in ripgrep[0].matches] == sorted(match.path for match in ripgrep[0].matches)
    assert {match.path for match in ripgrep[0].matches} >= {"a.py", "keep.log", "nested/r.md"}
    assert {match.path for match in ripgrep[1].matches} >= {".dot", "b.log", "build/out"}
    assert len(ripgrep[-1].matches) == 3


def test_a_match_says_where_it_is(root: Path) -> None:
    (reply,) = searched(root, {"pattern": "needle", "path": "/workspace/c.txt"})
    (match,) = reply.matches
    assert (match.path, match.line, match.column, match.text) == ("c.txt", 1, 3, b"x needle needle\r")


@pytest.mark.parametrize("engine", ["ripgrep", "python"])
def test_a_pattern_that_is_none_is_said_in_one_line(root: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    if engine == "python":
        monkeypatch.setattr(filesearch, "candidates", lambda name: [] if name == "rg" else ["python3"])
    with pytest.raises(EnvdError, match=r"^pattern '\(': .*(unclosed|unterminated)[^\n]*$"):
        searched(root, {"pattern": "("})


def test_no_path_leaves_the_workspace(root: Path) -> None:
    (root.parent / "secret").write_text("needle\n")
    (root / "up").symlink_to("..")
    for path in ("..", "../secret", "up", "up/secret", "/../secret"):
        try:
            (reply,) = searched(root, {"pattern": "needle", "path": path})
        except OSError:
            continue
        assert not any("secret" in match.path for match in reply.matches)


def test_a_flood_is_cut(root: Path) -> None:
    (root / "flood").write_text("needle\n" * 2_000_000)
    (reply,) = searched(root, {"pattern": "needle", "limit": 10_000})
    assert reply.truncated and len(reply.matches) == 10_000
