"""A task of several turns: find a number in a known range; after each wrong guess the environment says higher or lower.

Prompt: BEGIN, the lowest number of the range, and a salt that tells nothing. A guess is one token, an answer of the
environment one token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inference.bridge.client import BridgeClient, Sampling, Turn

PAD, END, BEGIN, HIGHER, LOWER, FIRST = 0, 1, 2, 3, 4, 8
"""Tokens; number n is token FIRST + n."""
RANGE = 8
LOWEST = 12
"""Ranges begin at 0 to LOWEST - 1."""
SALTS = 32
HELD_OUT = 4
"""One in so many pairs of range and salt is held out."""
GUESSES = 3
VOCABULARY = 64


@dataclass(frozen=True)
class Task:
    """One number to find, drawn at random."""

    low: int
    salt: int
    number: int

    @property
    def prompt(self) -> list[int]:
        return [BEGIN, FIRST + self.low, FIRST + self.salt]

    def answer(self, guess: int) -> list[int]:
        """What the environment says about a wrong guess."""
        return [HIGHER if guess < FIRST + self.number else LOWER]

    def solved(self, guess: int) -> bool:
        return guess == FIRST + self.number


@dataclass(frozen=True)
class Played:
    """An episode that has ended."""

    task: Task
    turns: list[Turn]
    solved: bool


def tasks(count: int, seed: int, held_out: bool = False) -> list[Task]:
    """Tasks drawn at random, from pairs of range and salt that only held-out tasks have, or from the others."""
    random = np.random.default_rng([seed, held_out])
    found: list[Task] = []
    while len(found) < count:
        low, salt, place = (int(random.integers(bound)) for bound in (LOWEST, SALTS, RANGE))
        if ((low * SALTS + salt) * 7 % HELD_OUT == 0) == held_out:
            found.append(Task(low, salt, low + place))
    return found


async def play(client: BridgeClient, wanted: Sequence[Task], seed: int, group: int = 1) -> list[Played]:
    """Play each task `group` times, all at the same time; groups stay together."""

    async def one(task: Task, number: int) -> Played:
        sampling = Sampling(max_tokens=1, seed=seed * 1_000_003 + number)
        async with await client.start(task.prompt, sampling=sampling) as episode:
            observation: list[int] = []
            solved = False
            for _ in range(GUESSES):
                turn = await episode.step(observation)
                guess = int(turn.token_ids[0])
                solved = task.solved(guess)
                if solved:
                    break
                observation = task.answer(guess)
            await episode.end(reward=float(solved))
        return Played(task, episode.turns, solved)

    every = [task for task in wanted for _ in range(group)]
    return list(await asyncio.gather(*(one(task, number) for number, task in enumerate(every))))


def demonstrations(count: int, seed: int) -> list[list[int]]:
    """Episodes of guesses that are only in the range, without a look at the answers: what the first policy learns."""
    random = np.random.default_rng(seed)
    found = []
    for task in tasks(count, seed):
        row = list(task.prompt)
        for guess in FIRST + task.low + random.integers(RANGE, size=GUESSES):
            row += [int(guess)] + ([] if task.solved(int(guess)) else task.answer(int(guess)))
            if task.solved(int(guess)):
                break
        found.append(row)
    return found
