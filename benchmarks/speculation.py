"""Speculation: turns of an experiment's base policy sampled again under their grammar, with guessed tokens and without.

The turns are those that the base policy took in one iteration. Both engines must sample the same tokens, with the same
log probabilities and supports; drafts only change how many passes that takes. Tokens that a grammar forces take no pass
of their own in either, so a third engine has neither grammar nor drafts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field

from benchmarks.measure import median, seconds_of
from benchmarks.policies import write_random_policy
from benchmarks.result import Options, Result
from benchmarks.workbench import DEFAULT_FOLDER, Workbench
from contracts.artifacts import Artifact, open_artifact
from contracts.chat import ChatTokenizer, parse_turn
from contracts.episodes import read_episodes
from contracts.store import Store
from inference.engines.base import Completion, SamplingParams
from inference.engines.builtin import BuiltinEngine
from inference.grammar.compiled import Vocabulary, compiled
from inference.grammar.matcher import Matcher
from inference.grammar.tools import tools_grammar
from inference.rollouts.transcript import policy_turns
from resources.experiment import Experiment
from resources.progress import no_progress
from resources.refs import require_ref
from trainer.model_config import ModelConfig
from triplane_dagster.assembly import definitions_for
from triplane_dagster.cli.quiet import quiet_dagster
from triplane_dagster.experiment_files import experiments_folder
from triplane_dagster.iterations import next_partition
from triplane_dagster.jobs import base_job_name, iteration_job_name
from triplane_dagster.run import open_instance

AT_ONCE = (1, 4, 64)
"""Sequences in flight."""
FIRST = "0000"
"""The iteration whose rollouts the base policy played."""
RANDOM_TURNS = 200
MASKS = 64
LARGE_VOCABULARY = 151_936
"""That of Qwen3; the tokens here are random bytes."""


class SpeculationOptions(Options):
    """Options of the `speculation` benchmark."""

    turns: int = Field(2000, ge=8, le=100_000)
    """Turns that are compared, at 64 at once; a fourth of them at 4, an eighth at 1."""
    repeats: int = Field(5, ge=1, le=100)
    """Runs of each engine, alternating; results are medians."""
    experiment: str = "quickstart"
    """The experiment whose base policy samples."""
    threads: int = Field(1, ge=1, le=256)
    """Torch threads."""
    work: str = DEFAULT_FOLDER
    """Folder that keeps the base policy and its turns between runs."""
    set: str = ""
    """Overrides of the experiment, separated by blanks."""


OPTIONS = SpeculationOptions


@dataclass(frozen=True)
class Turn:
    """What a turn continues, and its parameters."""

    context: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Run:
    """One engine over some turns."""

    completions: list[Completion]
    seconds: float
    passes: int
    """Forward passes that sampled a token, counted once for each sequence in the batch."""

    @property
    def tokens(self) -> int:
        """Tokens that were sampled or forced."""
        return sum(len(each.token_ids) for each in self.completions)


def run(options: SpeculationOptions) -> Result:
    """Make the base policy and an iteration of its turns if they are missing, and sample the turns again."""
    bench = Workbench.at(options.work)
    source = experiments_folder() / f"{options.experiment}.yaml"
    experiment = bench.add_experiment(source, "speculation", ["rollouts.grammar=true", *options.set.split()])
    bench.enter(experiment.name)
    policy, turns = _played(bench.store, experiment, options.turns)
    metrics: dict[str, float] = {}
    rows: list[dict[str, object]] = []
    for at_once in AT_ONCE:
        some = turns[: {1: len(turns) // 8, 4: len(turns) // 4}.get(at_once, len(turns))]
        _compare(policy, some, at_once, options, metrics, rows)
    metrics["random_calls_valid_percent"] = _random_calls(Path(options.work), policy, options)
    for name, size in (("", None), ("_large_vocabulary", LARGE_VOCABULARY)):
        metrics[f"mask_64_rows{name}_ms"] = _mask_ms(policy, turns[0], size)
    notes = [
        f"{len(turns)} turns of the base policy of {options.experiment}; {options.threads} torch threads; loading does"
        " not count; each run begins with an empty cache and no guesses",
        f"masks: filled and unpacked for {MASKS} requests inside a call; the large vocabulary has {LARGE_VOCABULARY:,}"
        " random tokens",
    ]
    return Result(metrics, rows, notes)


def _compare(
    policy: Path,
    turns: Sequence[Turn],
    at_once: int,
    options: SpeculationOptions,
    metrics: dict[str, float],
    rows: list[dict[str, object]],
) -> None:
    """Add the figures of `at_once` sequences in flight."""
    found: dict[str, list[Run]] = {"drafts": [], "plain": [], "free": []}
    for _ in range(options.repeats):
        for name, runs in found.items():
            runs.append(_sample(policy, turns, at_once, options.threads, name))
    rates = {name: median([each.tokens / each.seconds for each in runs]) for name, runs in found.items()}
    passes = {name: runs[0].passes / runs[0].tokens for name, runs in found.items()}
    metrics[f"differing_{at_once}"] = float(count_differing(found["drafts"], found["plain"]))
    metrics[f"speedup_{at_once}"] = rates["drafts"] / rates["plain"]
    metrics[f"passes_saved_{at_once}_percent"] = 100 * (1 - passes["drafts"] / passes["free"])
    rows += [
        {
            "at once": at_once,
            "engine": {"drafts": "grammar, drafts", "plain": "grammar", "free": "neither"}[name],
            "turns": len(turns),
            "tokens": runs[0].tokens,
            "tokens/s": round(rates[name]),
            "passes/token": round(passes[name], 3),
            "slowest run": round(min(each.tokens / each.seconds for each in runs)),
        }
        for name, runs in found.items()
    ]


def count_differing(drafts: Sequence[Run], plain: Sequence[Run]) -> int:
    """Number of turns that differ between two engines, over all repetitions."""
    runs = zip(drafts, plain, strict=True)
    pairs = (pair for own, other in runs for pair in zip(own.completions, other.completions, strict=True))
    return sum(not _same(own, other) for own, other in pairs)


def _same(own: Completion, other: Completion) -> bool:
    """Whether tokens, log probabilities, ends and supports are equal."""
    assert own.supports is not None and other.supports is not None
    pairs = (
        (getattr(own.supports, name), getattr(other.supports, name)) for name in ("numbers", "sizes", "left_out", "ids")
    )
    return own == other and all(np.array_equal(*pair) for pair in pairs)


def _sample(policy: Path, turns: Sequence[Turn], at_once: int, threads: int, name: str) -> Run:
    with asyncio.Runner() as loop:
        engine = BuiltinEngine(policy, "v", max_batch=max(AT_ONCE), threads=threads, drafts=name == "drafts")
        try:
            if name != "free":  # the grammar is compiled once, which is no part of sampling
                loop.run(engine.generate(turns[0].context, turns[0].params))
            before = engine.passes
            begin = time.perf_counter()
            completions = loop.run(_all(engine, turns, at_once, restricted=name != "free"))
            return Run(completions, time.perf_counter() - begin, engine.passes - before)
        finally:
            loop.run(engine.close())


async def _all(engine: BuiltinEngine, turns: Sequence[Turn], at_once: int, *, restricted: bool) -> list[Completion]:
    gate = asyncio.Semaphore(at_once)

    async def one(turn: Turn) -> Completion:
        params = turn.params
        if not restricted:
            params = SamplingParams(params.temperature, params.max_tokens, params.seed, params.stop_token_ids)
        async with gate:
            return await engine.generate(turn.context, params)

    return list(await asyncio.gather(*map(one, turns)))


def _played(store: Store, experiment: Experiment, count: int) -> tuple[Path, list[Turn]]:
    """Checkpoint of the base policy, and turns that it took in the first iteration."""
    turns: list[Turn] = []
    policy = _base(store, experiment)
    directory = policy.directory()
    tokenizer = ChatTokenizer.from_directory(directory)
    grammar, stops = tools_grammar(tokenizer), (tokenizer.end_of_turn, tokenizer.pad)
    rollouts = open_artifact(store, require_ref(store, experiment.name, "rollouts", FIRST))
    for episode in read_episodes(rollouts.table("episodes.parquet"), rollouts.table("sequences.parquet")):
        for sequence in episode.sequences:
            for start, _ in policy_turns(sequence):
                room = min(experiment.rollouts.max_turn_tokens, experiment.rollouts.max_tokens - start)
                params = SamplingParams(experiment.rollouts.temperature, room, episode.seed, stops, grammar=grammar)
                turns.append(Turn(sequence.token_ids[:start], params))
    return directory, turns[:count]


def _base(store: Store, experiment: Experiment) -> Artifact:
    """The base policy, after one iteration that it acted in."""
    definitions = definitions_for([experiment], no_progress)
    with quiet_dagster(), open_instance() as instance:
        definitions.resolve_job_def(base_job_name(experiment)).execute_in_process(instance=instance)
        if next_partition(store, experiment) == FIRST:
            instance.add_dynamic_partitions(experiment.name, [FIRST])
            job = definitions.resolve_job_def(iteration_job_name(experiment))
            job.execute_in_process(instance=instance, partition_key=FIRST)
    rollouts = open_artifact(store, require_ref(store, experiment.name, "rollouts", FIRST))
    return open_artifact(store, rollouts.manifest.parents["policy"])


def _random_calls(work: Path, policy: Path, options: SpeculationOptions) -> float:
    """Percentage of the calls of random weights that are valid, of those that end."""
    directory = work / "random-policy"
    if not directory.exists():
        tokenizer = (policy / "tokenizer.json").read_bytes()
        size = ChatTokenizer.from_directory(policy).vocabulary_size
        write_random_policy(directory, ModelConfig(), vocabulary=size)
        (directory / "tokenizer.json").write_bytes(tokenizer)
    tokenizer_ = ChatTokenizer.from_directory(directory)
    stops = (tokenizer_.end_of_turn, tokenizer_.pad)
    grammar = tools_grammar(tokenizer_)
    prompt = tokenizer_.prompt([("user", "call a tool")])
    turns = [Turn(prompt, SamplingParams(1.0, 400, seed, stops, grammar=grammar)) for seed in range(RANDOM_TURNS)]
    with asyncio.Runner() as loop:
        engine = BuiltinEngine(directory, "v", max_batch=max(AT_ONCE), threads=options.threads)
        try:
            found = loop.run(_all(engine, turns, max(AT_ONCE), restricted=True))
        finally:
            loop.run(engine.close())
    ended = [each for each in found if tokenizer_.call_end in each.token_ids]
    valid = 0
    for each in ended:
        last = len(each.token_ids) - each.token_ids[::-1].index(tokenizer_.call_end)
        valid += parse_turn(tokenizer_.decode(each.token_ids[:last])).error is None
    return 100 * valid / len(ended)


def _mask_ms(policy: Path, turn: Turn, size: int | None) -> float:
    """Milliseconds of the masks of MASKS requests inside a call. size: of a made-up vocabulary; None: the policy's."""
    tokenizer = ChatTokenizer.from_directory(policy)
    vocabulary = Vocabulary.of(policy / "tokenizer.json", tokenizer.vocabulary_size)
    if size is not None:
        random = np.random.default_rng(0)
        letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 324))]
        more = ["".join(random.choice(letters, random.integers(2, 9))) for _ in range(size - vocabulary.size)]
        vocabulary = Vocabulary((*vocabulary.tokens, *more), size)
    grammar = compiled(turn.params.grammar or "", vocabulary, turn.params.stop_token_ids)
    matchers = [Matcher(grammar, vocabulary.size) for _ in range(MASKS)]
    opening = tokenizer.encode_text('{"name":"read","arguments":{"path":"')
    for matcher in matchers:
        for token in (tokenizer.call_start, *opening):
            matcher.accept(token)
    return 1e3 * median(seconds_of(lambda: [matcher.mask() for matcher in matchers], repeats=20))
