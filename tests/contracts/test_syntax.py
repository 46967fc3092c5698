"""Parsing Python in threads."""

from __future__ import annotations

import ast
import subprocess
import sys
from types import SimpleNamespace

import pytest

from contracts import syntax

THREADS = """
import gc, sys, threading
import pytest

from contracts.syntax import parse_python

source = "\\n".join(f"def f{i}(a, b):\\n    return ((a + b) * [x for x in (1, 2, a)][0]) - a" for i in range(40))
faults = []
sys.setswitchinterval(1e-6)
# a collection amid a conversion runs Python, and so lets another thread parse: what makes CPython 3.11.7 miscount
gc.set_threshold(5, 1, 1)
gc.callbacks.append(lambda *_: sum(range(200)))

def parse():
    for _ in range(60):
        try:
            parse_python(source)
        except SystemError as fault:
            faults.append(fault)

threads = [threading.Thread(target=parse) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(faults))
"""


@pytest.mark.parametrize("source", ["x = " + "+".join(["a"] * 5000), "x = " + "-" * 20_000 + "1"])
def test_source_that_is_nested_too_deeply_is_a_syntax_error(source: str) -> None:
    with pytest.raises(SyntaxError, match="nested too deeply"):
        syntax.parse_python(source)
    assert syntax.is_deep(syntax.parse_python("x = " + "+".join(["a"] * 250)))
    assert not syntax.is_deep(syntax.parse_python("x = " + "+".join(["a"] * 150)))


def test_threads_can_parse_at_once() -> None:
    told = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True, timeout=300)
    assert told.stdout.strip() == "0"


def test_a_parse_that_another_thread_disturbed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([SystemError("AST constructor recursion depth mismatch"), ast.parse("x = 1")])

    def parse(source: str) -> ast.Module:
        answer = next(answers)
        if isinstance(answer, SystemError):
            raise answer
        return answer

    monkeypatch.setattr(syntax, "ast", SimpleNamespace(parse=parse))
    assert ast.unparse(syntax.parse_python("x = 1")) == "x = 1"
