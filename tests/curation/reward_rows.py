"""Small episodes with real tokens, committed as rollouts, and an environment plane that needs no server to grade
them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from contracts.artifacts import Artifact, ArtifactWriter
from contracts.chat import SPECIAL_TOKENS, ChatTokenizer, ToolCallText
from contracts.episodes import (
    Episode,
    Outcome,
    TokenRole,
    TokenSequence,
    ToolCallRecord,
    episodes_table,
    sequences_table,
)
from contracts.store import Store
from contracts.tasks import Checks, Split, Task
from curation.rewards import Graded, RewardConfig, grade_rollouts
from curation.verify import Verifier
from envd.client import SandboxClient, TestOutcome, VerifyResult

TASK = Task(
    "t",
    "sum",
    Split.TRAIN,
    "make add() add",
    {"app.py": b"x\n", "tests/test_app.py": b""},
    {},
    ("test_a", "test_b"),
    b"ref",
    {},
    checks=Checks(None, ()),
)


@cache
def byte_pairs() -> Tokenizer:
    """Bytes and a few merges."""
    text = Tokenizer(models.BPE())
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    text.train_from_iterator(["def add(a, b): return a + b"] * 4, trainer)
    return text


def tokenizer() -> ChatTokenizer:
    """Of the acting policy."""
    return ChatTokenizer(byte_pairs())


def call(name: str, ok: bool = True, turn: int = 0, **arguments: Any) -> ToolCallRecord:
    """One executed call."""
    return ToolCallRecord(turn, name, json.dumps(arguments, sort_keys=True), ok, "done" if ok else "error")


def episode(
    name: str,
    diff: bytes = b"right",
    says: str = "",
    outcome: Outcome = Outcome.COMPLETED,
    calls: Sequence[ToolCallRecord] = (call("edit", path="app.py", new="y"),),
) -> Episode:
    """An episode whose policy says something beside its call."""
    chat = tokenizer()
    prompt = chat.prompt([("user", TASK.instruction)])
    turn = chat.policy_turn([ToolCallText("edit", {"path": "app.py"})], says)
    roles = [int(TokenRole.PROMPT)] * len(prompt) + [int(TokenRole.POLICY)] * len(turn)
    logprobs = [None] * len(prompt) + [-1.0] * len(turn)
    sequence = TokenSequence([*prompt, *turn], roles, logprobs, [("p", len(prompt), len(roles))])
    return Episode(
        name,
        "g",
        "t",
        TASK.digest,
        TASK.files_digest,
        0,
        0,
        0,
        "p",
        1.0,
        512,
        outcome,
        3,
        list(calls),
        0,
        diff,
        [sequence],
    )


def rollouts(store: Store, episodes: Sequence[Episode], key: str = "0" * 64) -> Artifact:
    """The episodes as a committed artifact."""
    with ArtifactWriter(store, "rollouts", key, parents={}, config={}, code_version="1") as out:
        out.add_table("episodes.parquet", episodes_table(list(episodes)))
        out.add_table("sequences.parquet", sequences_table(list(episodes)))
        return out.commit()


class Bench(SandboxClient):
    """Passes both tests of the diff "right", one of "half", none of "wrong"; counts what it is asked."""

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__("unix:/nowhere")
        self.delay_s, self.verified = delay_s, 0

    async def put_template(self, files: Mapping[str, bytes], base: Mapping[str, bytes] | None = None) -> str:
        return "template"

    async def verify(
        self, template: str, diff: bytes, hidden_files: Mapping[str, bytes], tests: Sequence[str], **limits: Any
    ) -> VerifyResult:
        self.verified += 1
        await asyncio.sleep(self.delay_s)
        passed = {b"right": 2, b"half": 1}.get(diff.partition(b" ")[0], 0)
        outcomes = [TestOutcome(name, "passed" if index < passed else "failed", "") for index, name in enumerate(tests)]
        return VerifyResult(tuple(outcomes), "completed", "", 0.0)


def grade(store: Store, artifact: Artifact, config: RewardConfig, bench: SandboxClient | None = None) -> Graded:
    """Grade an artifact with answers and verdicts kept in `store`."""

    async def run() -> Graded:
        verifier = Verifier(bench or Bench(), store)
        return await grade_rollouts(
            artifact, {"t": TASK}, verifier, config, lambda done, total: None, store=store, tokenizer=tokenizer
        )

    return asyncio.run(run())
