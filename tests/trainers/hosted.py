"""Episodes of hosted tasks, for trainers that know the bridge's client alone: they ask for turns, the bridge does the
rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from inference.bridge.client import BridgeClient, Turn
from inference.bridge.client.tokens import Ids, Logprobs

GROUP, PROMPTS, STEPS, ITERATIONS = 8, 64, 8, 8
"""Episodes of a prompt, prompts and optimizer steps of an iteration, and iterations of both trainers."""
RATE = 9e-5
"""Their learning rate, as in quickstart."""
AT_ONCE = 256
"""Open episodes at most."""
_TRIES = 3


@dataclass(frozen=True)
class Played:
    """An episode that is over."""

    task_id: str
    prompt: Ids
    turns: list[Turn]
    reward: float
    solved: bool

    def tokens(self) -> tuple[Ids, Logprobs, npt.NDArray[np.bool_]]:
        """Ids, logprobs and whether the policy sampled it, of each token after the prompt."""
        ids, logprobs, own = list[Ids](), list[Logprobs](), list[npt.NDArray[np.bool_]]()
        for turn in self.turns:
            seen, made = len(turn.observation_ids), len(turn.token_ids)
            ids += [turn.observation_ids, turn.token_ids]
            logprobs += [np.zeros(seen, np.float32), turn.logprobs]
            own += [np.zeros(seen, np.bool_), np.ones(made, np.bool_)]
        return np.concatenate(ids), np.concatenate(logprobs), np.concatenate(own)


async def play(client: BridgeClient, task_ids: Sequence[str], seed: int, group: int = 1) -> list[Played]:
    """Play each task `group` times, all at the same time; groups stay together."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(task_id: str, number: int) -> Played:
        async with slots:
            for attempt in range(_TRIES):
                drawn = (seed * 1_000_003 + number) * _TRIES + attempt
                async with await client.start_task(task_id, seed=drawn) as episode:
                    while not episode.done:
                        await episode.step()
                reply = episode.turns[-1].reply
                if reply is not None and reply.reward is not None:
                    solved = reply.components["solved"] > 0
                    return Played(task_id, episode.prompt_ids, episode.turns, reply.reward, solved)
        raise AssertionError(f"{task_id} has no reward after {_TRIES} tries: {reply}")

    every = [task_id for task_id in task_ids for _ in range(group)]
    return list(await asyncio.gather(*(one(task_id, number) for number, task_id in enumerate(every))))


async def solving(client: BridgeClient, task_ids: Sequence[str], seed: int, group: int = 8) -> float:
    """Percent of episodes that are solved, at the experiment's temperature."""
    played = await play(client, task_ids, seed, group)
    return 100 * sum(each.solved for each in played) / len(played)
