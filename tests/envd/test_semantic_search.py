"""Semantic search on real embedded Qdrant: chunks by syntax, only what changed is embedded again, vectors from an
endpoint or hashed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from envd.errors import EnvdError
from envd.guest.link import GuestLink
from envd.semantic.chunks import BLOCK_LINES, chunks_of
from envd.semantic.embedding import HashedNgrams
from envd.semantic.index import SemanticConfig, WorkspaceIndex
from envd.server import semantic
from envd.server.toolrunner import run_batch
from envd.types import ToolCall, ToolResult
from tests.envd.agents import with_agent

BANK = b'''"""Accounts."""
import decimal

RATE = decimal.Decimal("0.02")


class Account:
    """Money of one owner."""

    def __init__(self, owner):
        self.owner = owner

    @property
    def interest(self):
        return self.balance * RATE


def transfer_money(source, target, amount):
    source.withdraw(amount)
    target.deposit(amount)
'''
FILES = {
    "bank.py": BANK,
    "web/routes.py": b"def render_login_page(request):\n    return template('login.html')\n",
    "notes.md": b"".join(b"line %d about gardening and tomatoes\n" % n for n in range(100)),
    "broken.py": b"def half(:\n  x = = 1\n",
    "data.bin": b"\0\1\2",
    "empty.py": b"",
}


def test_python_is_cut_at_its_definitions() -> None:
    found = [(chunk.start, chunk.end, chunk.name) for chunk in chunks_of("bank.py", BANK)]
    assert found == [
        (1, 6, ""),
        (7, 9, "Account"),
        (10, 11, "Account.__init__"),
        (13, 15, "Account.interest"),
        (18, 20, "transfer_money"),
    ]
    assert chunks_of("data.bin", FILES["data.bin"]) == [] and chunks_of("empty.py", b"") == []


@pytest.mark.parametrize("path", ["notes.md", "bank.py", "broken.py", "web/routes.py"])
def test_every_line_with_something_on_it_is_in_a_chunk(path: str) -> None:
    lines = FILES[path].decode().splitlines()
    covered = {line for chunk in chunks_of(path, FILES[path]) for line in range(chunk.start, chunk.end + 1)}
    assert {number for number, line in enumerate(lines, 1) if line.strip()} <= covered
    assert all(chunk.end - chunk.start < BLOCK_LINES for chunk in chunks_of(path, FILES[path]))


def test_syntax_nested_without_end_is_cut_all_the_same() -> None:
    deep = b"(" * 50_000 + b"\n" + b"".join(b" " * n + b"class A:\n" for n in range(300))
    assert chunks_of("deep.py", deep)


def test_the_nearest_piece_comes_first_and_is_the_same_each_time() -> None:
    answers = []
    for _ in range(2):
        index = WorkspaceIndex(SemanticConfig())
        index.update(FILES, ())
        answers.append(index.search("transfer money between accounts") + index.search("login page"))
        assert index.search("transfer money")[0].name == "transfer_money"
        assert index.search("login")[0].path == "web/routes.py"
        assert {hit.path for hit in index.search("money", below="web")} <= {"web/routes.py"}
        assert index.search("tomatoes", limit=2)[0].path == "notes.md"
        index.close()
    assert answers[0] == answers[1]


def test_only_what_changed_is_embedded_again() -> None:
    index = WorkspaceIndex(SemanticConfig())
    index.update(FILES, ())
    first = index.embedded
    index.update(FILES, ())
    assert index.embedded == first
    index.update({"web/routes.py": b"def render_logout_page(request):\n    pass\n"}, ["notes.md"])
    assert index.embedded == first + 1
    assert [hit.name for hit in index.search("page", below="web")] == ["render_logout_page"]
    assert not any(hit.path == "notes.md" for hit in index.search("tomatoes", limit=20))
    index.close()


def test_an_index_in_a_directory_works_too(tmp_path: Path) -> None:
    index = WorkspaceIndex(SemanticConfig(qdrant=str(tmp_path / "qdrant")))
    index.update(FILES, ())
    assert index.search("login page")[0].path == "web/routes.py"
    index.close()


class _Endpoint(BaseHTTPRequestHandler):
    """Answers as OpenAI's embeddings do, out of order, with vectors of its own kind."""

    seen: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).seen.append({**asked, "path": self.path, "key": self.headers["authorization"]})
        rows = [
            {"index": n, "embedding": [float("login" in text), float("money" in text), 0.01]}
            for n, text in enumerate(asked["input"])
        ]
        body = json.dumps({"data": rows[::-1]} if asked["model"] != "broken" else {"no": "data"}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def endpoint() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Endpoint)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_vectors_come_from_an_openai_compatible_endpoint() -> None:
    with endpoint() as url:
        index = WorkspaceIndex(SemanticConfig(endpoint=url, model="small", key="secret"))
        index.update(FILES, ())
        assert index.search("login")[0].path == "web/routes.py"
        assert {(each["path"], each["model"], each["key"]) for each in _Endpoint.seen} == {
            ("/v1/embeddings", "small", "Bearer secret")
        }
        index.close()
        with pytest.raises(EnvdError, match=r"embeddings endpoint .* failed"):
            WorkspaceIndex(SemanticConfig(endpoint=url, model="broken"))
    with pytest.raises(EnvdError, match=r"embeddings endpoint .* failed"):
        WorkspaceIndex(SemanticConfig(endpoint="http://127.0.0.1:9/v1"))


def test_hashed_vectors_have_length_one_and_know_parts_of_names() -> None:
    one, other, far = HashedNgrams().embed(["renderLoginPage", "render_login_page", "tomato soup"])
    assert abs(sum(value * value for value in one) - 1) < 1e-9
    near = sum(a * b for a, b in zip(one, other, strict=True))
    assert near > 0.8 > 0.2 > sum(a * b for a, b in zip(one, far, strict=True))
    assert HashedNgrams().embed([""])[0] == [0.0] * HashedNgrams.dimensions


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, content in FILES.items():
        (tmp_path / "workspace" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "workspace" / path).write_bytes(content)
    return tmp_path / "workspace"


def ask(query: str, **more: object) -> ToolCall:
    return ToolCall("semantic_search", {"query": query, **more})


def test_the_tool_sees_what_calls_before_it_changed(root: Path) -> None:
    new = "def sail_across_oceans(boat):\n    pass\n"
    calls = [
        ask("transfer money", limit=1),
        ToolCall("write", {"path": "sea.py", "content": new}),
        ask("sail the ocean", limit=1),
        ToolCall("exec", {"command": "rm sea.py"}),
        ask("sail the ocean", limit=1, path="web"),
        ask("x", path="gone"),
        ask("x", limit=99),
        ask(" "),
    ]

    async def job(guest: GuestLink) -> list[ToolResult]:
        return await run_batch(guest, calls, 30)

    texts = [result.text for result in with_agent(root, job)]
    assert (
        texts[0] == "bank.py:18-20 transfer_money\n  18 def transfer_money(source, target, amount):\n"
        "  19     source.withdraw(amount)\n  20     target.deposit(amount)"
    )
    assert texts[2].startswith("sea.py:1-2 sail_across_oceans\n  1 def sail_across_oceans(boat):")
    assert "sea.py" not in texts[4]
    assert texts[5] == "error: no such file: gone"
    assert texts[6] == texts[7] == "error: semantic_search: give a query, and a limit from 1 to 20"
    assert not semantic._kept


def test_without_the_extra_the_tool_says_how_to_get_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semantic, "find_spec", lambda name: None)

    async def job(guest: GuestLink) -> list[ToolResult]:
        return await run_batch(guest, [ask("x")], 5)

    (result,) = with_agent(root, job)
    assert not result.ok and result.text.endswith("pip install 'triplane[search]'")
