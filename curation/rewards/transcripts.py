"""Text and tokens of episodes as judges and reward models read them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from contracts.chat import TURN_END, TURN_START, ChatTokenizer, message_views
from contracts.episodes import TokenRole
from contracts.tasks import Task
from curation.errors import RewardsMismatch

_SPEAKERS = {TokenRole.PROMPT: "prompt", TokenRole.POLICY: "agent"}
_SPOKEN = re.compile(r"(?<![^\n\r\v\f\x85\u2028\u2029])(?=(prompt|agent|environment):)", re.IGNORECASE)
"""Start of a line that looks like the label of a speaker, such as `agent:`."""


class Transcripts:
    """The token sequences of a `rollouts` artifact, by episode."""

    def __init__(self, sequences: pa.Table, tokenizer: ChatTokenizer) -> None:
        """sequences: rows of SEQUENCES. tokenizer: the acting policy's."""
        self._sequences, self._tokenizer = sequences, tokenizer
        self._rows: dict[str, list[int]] = {}
        for row, episode in enumerate(sequences["episode_id"].to_pylist()):
            self._rows.setdefault(episode, []).append(row)

    def tokens(self, episode_id: str) -> list[int]:
        """Token ids of the episode's last context."""
        return list(self._contexts(episode_id)[-1]["token_ids"])

    def text(self, episode_id: str) -> str:
        """All contexts of an episode, with each run of tokens under its role."""
        return "\n\n".join(self._context(row) for row in self._contexts(episode_id))

    def _contexts(self, episode_id: str) -> list[dict[str, Any]]:
        rows = self._rows.get(episode_id)
        if not rows:
            raise RewardsMismatch(f"episode {episode_id} has no sequence: these rollouts can't be judged")
        found: list[dict[str, Any]] = self._sequences.take(rows).to_pylist()
        return sorted(found, key=lambda row: row["index"])

    def _context(self, row: Mapping[str, Any]) -> str:
        views = message_views(self._tokenizer, row["token_ids"], row["token_role"])
        return "\n".join(map(_run, views))


def parts_of(episode: Mapping[str, Any], task: Task, transcripts: Transcripts, wanted: set[str]) -> dict[str, str]:
    """Requested parts of an episode, by name as in curation.rewards.prompt.PARTS."""
    parts: dict[str, str] = {}
    if "task" in wanted:
        parts["task"] = task.instruction
    if "diff" in wanted:
        parts["diff"] = episode["final_diff"].decode(errors="replace") or "(nothing was changed)"
    if "transcript" in wanted:
        parts["transcript"] = transcripts.text(episode["episode_id"])
    if "reference" in wanted:
        parts["reference"] = task.reference_diff.decode(errors="replace")
    return parts


def _run(view: Mapping[str, Any]) -> str:
    """Role of a run, and its text without turn markers. An agent could imitate the answers of its tools, so a line that
    begins like a run gets a blank before it.
    """
    text = view["text"].replace(TURN_START, "").replace(TURN_END, "").strip()
    said = text if view["role"] == TokenRole.PROMPT else _SPOKEN.sub(" ", text)
    return f"{_SPEAKERS.get(view['role'], 'environment')}: {said}"
