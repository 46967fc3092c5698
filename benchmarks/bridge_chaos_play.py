"""Episodes of the `bridge-chaos` benchmark: what is asked next, as a function of the turns so far, and the log of a
client.

A line of the log is written before its client goes on:

    {"piece": [episode, step, first], ...}                    tokens that the client has seen of a turn
    {"turn": [episode, step], ...}                            a turn that has ended
    {"done": episode, "executed": {call: times} or null}      the episode's end; null: killed before it had the record
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from benchmarks.bridge_chaos_server import VOCABULARY
from inference.bridge.client import Finish, Reply, Span, Turn

TURNS = 3
"""Turns of an episode, unless the engine is lost in one: the rest is another turn then."""
_HOSTED_EVERY = 8


def identity(run: str, number: int) -> str:
    """Id of an episode of a run."""
    return f"{run}-{number:012}"


def is_hosted(number: int) -> bool:
    """Whether the bridge plays the environment of an episode."""
    return number % _HOSTED_EVERY == 0


def prompt_of(number: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """[4 to 11] prompt of an episode."""
    return ((np.arange(4 + number % 8) * 31 + number) % VOCABULARY).astype(np.int32)


def following(number: int, turns: Sequence[Turn]) -> tuple[list[int], int] | None:
    """The observation and the tokens to ask for after `turns`; None if the episode is over.

    The observation depends on all tokens so far. A turn that the engine lost goes on without one.
    """
    played, left, seen = 0, _wanted(number, 0), hashlib.sha256(prompt_of(number).data)
    observation: list[int] = []
    for turn in turns:
        seen.update(turn.observation_ids.data)
        seen.update(turn.token_ids.data)
        left -= len(turn.token_ids)
        observation = []
        if left == 0:
            played += 1
            if played == TURNS:
                return None
            left = _wanted(number, played)
            observation = [each % VOCABULARY for each in seen.digest()[: 1 + number % 5]]
    return observation, left


def digest_of(number: int, turns: Sequence[Turn]) -> str:
    """Digest of an episode's tokens, logprobs, versions and grade, wherever its turns were split."""
    found = hashlib.sha256(prompt_of(number).data)
    for turn in turns:
        found.update(turn.observation_ids.data)
        for span in turn.spans:
            for place in range(span.first, span.end):
                found.update(turn.token_ids[place].tobytes() + turn.logprobs[place].tobytes() + span.version.encode())
        if turn.reply is not None:
            found.update(repr((turn.reply.outcome, turn.reply.reward, turn.reply.verdict)).encode())
    return found.hexdigest()


class Log:
    """What a client has seen, in a file that outlives it."""

    def __init__(self, file: Path) -> None:
        """A line that a killed client left unfinished is cut off."""
        if file.exists():
            data = file.read_bytes()
            file.write_bytes(data[: data.rfind(b"\n") + 1])
        self._file: IO[bytes] = file.open("ab", buffering=0)

    def piece(self, number: int, step: int, first: int, ids: bytes, logprobs: bytes) -> None:
        """Note tokens that were seen."""
        self._write({"piece": [number, step, first], "ids": _text(ids), "logprobs": _text(logprobs)})

    def turn(self, number: int, turn: Turn) -> None:
        """Note a turn that has ended."""
        arrays = (turn.observation_ids, turn.token_ids, turn.logprobs)
        names = ("observation", "ids", "logprobs")
        line: dict[str, Any] = {name: _text(array.tobytes()) for name, array in zip(names, arrays, strict=True)}
        spans = [[each.version, each.first, each.end] for each in turn.spans]
        if (reply := turn.reply) is not None:
            line["reply"] = [_text(reply.observation_ids.tobytes()), reply.done, reply.outcome, reply.failure]
            line["reply"] += [reply.reward, reply.verdict]
        self._write({"turn": [number, turn.step], "spans": spans, "finish": turn.finish.value} | line)

    def done(self, number: int, executed: Mapping[str, int] | None) -> None:
        """Note an episode's end, and how often each of its calls was executed."""
        self._write({"done": number, "executed": executed})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")


class Seen:
    """What the log of a client says."""

    def __init__(self, file: Path) -> None:
        self.turns: dict[int, list[Turn]] = {}
        self.done: dict[int, dict[str, int] | None] = {}
        """Executions of each call of the episodes that have ended; None: unknown."""
        self.pieces: list[tuple[int, int, int, bytes, bytes]] = []
        """Episode, step, first token, ids, logprobs."""
        for line in _lines(file):
            if "piece" in line:
                self.pieces.append((*line["piece"], _bytes(line["ids"]), _bytes(line["logprobs"])))
            elif "turn" in line:
                self.turns.setdefault(line["turn"][0], []).append(_turn(line))
            else:
                self.done[line["done"]] = line["executed"]

    def changed(self) -> int:
        """Tokens that a client saw and that are others in the turn that it has now."""
        found = 0
        for number, step, first, ids, logprobs in self.pieces:
            turns = self.turns.get(number, [])
            if step > len(turns):
                continue
            turn, count = turns[step - 1], len(ids) // 4
            kept, scores = turn.token_ids[first : first + count], turn.logprobs[first : first + count]
            if kept.tobytes() != ids or scores.tobytes() != logprobs:
                found += count
        return found


def _wanted(number: int, turn: int) -> int:
    return 12 + (number * 7 + turn * 5) % 24


def _turn(line: dict[str, Any]) -> Turn:
    return Turn(
        line["turn"][1],
        np.frombuffer(_bytes(line["observation"]), "<i4"),
        np.frombuffer(_bytes(line["ids"]), "<i4"),
        np.frombuffer(_bytes(line["logprobs"]), "<f4"),
        tuple(Span(*each) for each in line["spans"]),
        Finish(line["finish"]),
        _reply(*line["reply"]) if "reply" in line else None,
    )


def _reply(observation: str, done: bool, outcome: str, failure: str, reward: float | None, verdict: str) -> Reply:
    return Reply(np.frombuffer(_bytes(observation), "<i4"), (), "", done, outcome, failure, reward, {}, verdict)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    data = file.read_bytes() if file.exists() else b""
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        yield json.loads(line)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
