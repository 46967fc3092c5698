"""A worker process of the kill test: `python rollouts_worker.py STORE ENVD_ADDRESS PLAN_JSON`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rollouts_script import GraderByDiff, ScriptedEngine, byte_tokenizer, make_tasks, read_then_maybe_fix

from contracts.store import LocalStore
from envd.client import SandboxClient
from inference.rollouts.plan import RolloutPlan
from inference.rollouts.worker import run_shard


async def main(store: str, address: str, plan: RolloutPlan) -> None:
    tokenizer = byte_tokenizer()
    async with SandboxClient(address) as client:
        await run_shard(
            plan,
            0,
            engine=ScriptedEngine(tokenizer, read_then_maybe_fix, delay_s=0.2),
            sandboxes=client,
            tokenizer=tokenizer,
            tasks=make_tasks(40),
            store=LocalStore(Path(store)),
            grader=GraderByDiff(),
        )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], RolloutPlan.model_validate_json(sys.argv[3])))
