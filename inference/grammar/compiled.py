"""Compile grammars for a policy's tokenizer, in bounded time and memory.

A grammar may take exponential time or memory to compile. So a child process compiles it first, under limits; what
passes there is compiled again here, in about the same time.
"""

from __future__ import annotations

import asyncio
import functools
import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from contracts.rpc import caller
from inference.errors import EngineError
from inference.grammar.library import xgrammar

SECONDS = 60
"""Processor time that compiling may take."""
BYTES = 16 << 30
"""Address space of the compiling process; loading the libraries takes about 3 GiB of it."""
KEPT = 64
"""Compiled grammars that are kept, and refused ones."""
REFUSED_S = 300.0
"""Seconds for which a refusal is kept. Not for ever: the machine may have had no memory left."""
T = TypeVar("T")
_Key = tuple[str, "Vocabulary", tuple[int, ...]]
_compiler = ThreadPoolExecutor(1, "grammars")
"""Compiles new grammars, one at a time."""
_lock = threading.Lock()
_waiting = caller.Turns[tuple[Future[Any], _Key]]()
"""New grammars."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens of a policy as the compiler reads them."""

    tokens: tuple[str, ...]
    """In order of id, in the characters that byte-level BPE writes bytes in; empty for ids without a token."""
    size: int
    """Width of the policy's logits."""

    @classmethod
    def of(cls, tokenizer: Path, size: int) -> Vocabulary:
        """Vocabulary of a `tokenizer.json`. Raises EngineError if its tokens are not bytes."""
        try:
            return _read(tokenizer, tokenizer.stat().st_mtime_ns, size)
        except FileNotFoundError:
            raise EngineError(f"a grammar needs the policy's tokenizer, {tokenizer}, which does not exist") from None
        except ValueError as error:
            raise EngineError(f"a grammar can't use the tokenizer {tokenizer}: {error}") from None

    def info(self, stops: Sequence[int]) -> Any:
        """xgrammar's TokenizerInfo. stops: ids of the tokens that end a completion."""
        module = xgrammar()
        kind = module.VocabType.BYTE_LEVEL
        return module.TokenizerInfo(list(self.tokens), kind, vocab_size=self.size, stop_token_ids=list(stops))


@functools.lru_cache(16)
def _read(tokenizer: Path, changed_ns: int, size: int) -> Vocabulary:
    return _vocabulary(tokenizer.read_text(encoding="utf-8"), size)


@functools.lru_cache(4)
def _vocabulary(text: str, size: int) -> Vocabulary:
    if "ByteLevel" not in json.dumps(json.loads(text).get("decoder")):
        raise ValueError("its tokens are not bytes, as those of byte-level BPE are")
    tokens = [""] * size
    for token, number in Tokenizer.from_str(text).get_vocab(with_added_tokens=True).items():
        if number >= size:
            raise ValueError(f"it has token {number}, the policy {size} tokens")
        tokens[number] = token
    return Vocabulary(tuple(tokens), size)


_done: dict[_Key, Any] = {}
_refused: dict[_Key, tuple[float, str]] = {}
"""Until when, and why."""


def compiled(grammar: str, vocabulary: Vocabulary, stops: Sequence[int]) -> Any:
    """xgrammar's CompiledGrammar of a structural tag, as JSON text; the last KEPT are kept. A new one may take seconds,
    and waits for other new ones.

    Raises EngineError for a grammar that is invalid, or exceeds SECONDS or BYTES.
    """
    key = grammar, vocabulary, tuple(sorted(stops))
    found = _known(key)
    return _submitted(key).result() if found is None else found


async def compiled_async(grammar: str, vocabulary: Vocabulary, stops: Sequence[int]) -> Any:
    """`compiled`. Callers that wait take no thread of asyncio's pool, which others need."""
    key = grammar, vocabulary, tuple(sorted(stops))
    found = _known(key)
    return await asyncio.wrap_future(_submitted(key)) if found is None else found


def _submitted(key: _Key) -> Future[Any]:
    """Result of `_compiled`, which new grammars of other bearer keys delay by one each."""
    future: Future[Any] = Future()
    with _lock:
        _waiting.add((future, key))
    _compiler.submit(_compile_next)
    return future


def _compile_next() -> None:
    with _lock:
        future, key = _waiting.take()
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(_compiled(key))
    except BaseException as error:  # noqa: BLE001 (raised where the future is awaited)
        future.set_exception(error)


def _compiled(key: _Key) -> Any:
    found = _known(key)  # compiled while this waited
    if found is not None:
        return found
    try:
        _try(*key)
    except EngineError as error:
        _keep(_refused, key, (time.monotonic() + REFUSED_S, str(error)))
        raise
    found = _compile(*key)
    _keep(_done, key, found)
    return found


def _known(key: _Key) -> Any:
    """What is kept of a grammar; None: nothing. Raises EngineError if it was refused."""
    found = _done.get(key)
    if found is not None:
        _keep(_done, key, found)
        return found
    until, reason = _refused.get(key, (0.0, ""))
    if time.monotonic() < until:
        raise EngineError(reason)
    return None


def _keep(kept: dict[_Key, T], key: _Key, value: T) -> None:
    """Keep the newest KEPT."""
    with _lock:
        kept.pop(key, None)
        kept[key] = value
        if len(kept) > KEPT:
            del kept[next(iter(kept))]


def _compile(grammar: str, vocabulary: Vocabulary, stops: Sequence[int]) -> Any:
    compiler = xgrammar().GrammarCompiler(vocabulary.info(stops), max_threads=1, cache_enabled=False)
    return compiler.compile_structural_tag(grammar)


def _try(grammar: str, vocabulary: Vocabulary, stops: Sequence[int]) -> None:
    """Compile in a child process. Raises EngineError."""
    told = json.dumps([grammar, vocabulary.tokens, vocabulary.size, stops, SECONDS, BYTES])
    command = [sys.executable, "-m", "inference.grammar.compiled"]
    shown = grammar if len(grammar) <= 200 else f"{grammar[:200]}..."
    try:
        found = subprocess.run(command, input=told, capture_output=True, text=True, timeout=10 * SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"grammar {shown} did not compile within {10 * SECONDS} s: is the machine overloaded?"
        ) from None
    if found.returncode == 0:
        return
    if found.returncode == 1:
        raise EngineError(f"grammar {shown} does not compile: {found.stdout.strip() or found.stderr.strip()[-500:]}")
    raise EngineError(
        f"grammar {shown} takes more than {SECONDS} s or {BYTES >> 30} GiB to compile (exit status"
        f" {found.returncode}): bound its repetitions"
    )


def _main() -> int:
    """Compile what standard input names. Exit status 1: it is invalid, which the output explains; 2: no memory."""
    grammar, tokens, size, stops, seconds, largest = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (largest, largest))
    try:
        _compile(grammar, Vocabulary(tuple(tokens), size), stops)
    except MemoryError:
        return 2
    except Exception as error:  # noqa: BLE001 (the library raises its own and RuntimeError, and all mean the same)
        if "bad_alloc" in str(error):
            return 2
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
