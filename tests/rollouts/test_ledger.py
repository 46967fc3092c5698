"""The ledger holds every sampled turn, of committed and of lost work, and bears what a kill tears."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from rollouts_script import POLICY, ScriptedEngine, one_file_task

from contracts.chat import ChatTokenizer
from contracts.episodes import Slot
from envd.client import Limits, SandboxClient
from inference.rollouts import ledger
from inference.rollouts.config import RolloutConfig
from inference.rollouts.episode import Player, play_episode
from inference.rollouts.ledger import FILE, read_ledger, record
from inference.rollouts.workspace import Workspaces


def test_every_turn_is_a_line(tmp_path: Path, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_FOLDER", str(tmp_path))
    engine = ScriptedEngine(tokenizer, lambda turn, seed: "<tool_call>{bad</tool_call>" if turn == 0 else "done")

    async def play() -> int:
        workspaces = Workspaces(SandboxClient("unix:/nowhere"), Limits(), 1.0)
        config = RolloutConfig(max_tokens=1200, max_turn_tokens=200)
        player = Player(engine, workspaces, tokenizer, config, POLICY.digest, "work", asyncio.Semaphore(1))
        episode = await play_episode(player, one_file_task(0), Slot("test", "0001", "g", "task-000", 0, 5), "g")
        return int(episode.telemetry["engine_tokens"])

    tokens = asyncio.run(play())
    lines = list(read_ledger(tmp_path))
    assert [(line.key, line.group, line.attempt, line.turn) for line in lines] == [
        ("work", "g", 0, 1),
        ("work", "g", 0, 2),
    ]
    assert sum(line.tokens for line in lines) == tokens and {line.pid for line in lines} == {os.getpid()}


def test_incomplete_ledger_line_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_FOLDER", str(tmp_path))
    record("k", "g", "e", 0, 1, 5, 0.0)
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole + whole[: len(whole) // 2])
    record("k", "g", "e", 0, 2, 7, 0.0)
    assert [line.tokens for line in read_ledger(tmp_path)] == [5, 7]
    assert json.loads(whole)["tokens"] == 5


def test_no_ledger_is_kept_unless_asked_for(tmp_path: Path) -> None:
    assert ledger._FOLDER is None
    record("k", "g", "e", 0, 1, 5, 0.0)
    assert list(read_ledger(tmp_path)) == []
