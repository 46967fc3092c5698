"""`triplane evaluate`: measure any policy on any task suite."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contracts.artifacts import Artifact, open_artifact
from contracts.errors import ConfigError
from contracts.store import Store, open_store
from contracts.tasks import Split
from triplane_dagster.cli.evaluations import named_evaluation, show_result
from triplane_dagster.cli.experiments import file_in_store
from triplane_dagster.cli.interrupts import stoppable
from triplane_dagster.cli.options import AsJson, Overrides
from triplane_dagster.cli.output import print_json, print_rows
from triplane_dagster.cli.suites import OfSuite, chosen_suite

if TYPE_CHECKING:
    from ops.spec import Work
    from resources.evaluation import Evaluation
    from resources.experiment import Experiment

UNSAVED = "unsaved"
"""Name of an evaluation that no file holds."""


def evaluate(
    policy: Annotated[
        str,
        typer.Argument(
            metavar="POLICY",
            help="Digest of a checkpoint, live, base, NAME/live, NAME/0003, a Hugging Face folder, or the URL of a"
            " server (up to and including /v1).",
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option("--name", help="Named evaluation, whose file has all settings; see `triplane evaluations names`."),
    ] = None,
    suite: OfSuite = None,
    split: Annotated[Split | None, typer.Option("--split", help="Split to play; default: held_out.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Episodes per task; default: as in iterations.")
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Sample at temperature 0, by default once per task.")
    ] = False,
    experiment: Annotated[
        str | None,
        typer.Option(
            "--experiment",
            "-e",
            help="Experiment (name or YAML file) whose agent loop, engine and sandboxes are used; default: that of"
            " POLICY, else quickstart.",
        ),
    ] = None,
    overrides: Overrides = None,
    save: Annotated[
        str | None, typer.Option("--save", help="Write these settings as a named evaluation, for --name.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the tokenizer of a server's model that is not in the store.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name at a server; default: its first one.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be played; write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure a policy on a split of a task suite: pass rate with its 95% interval, maj@k, pass@k and costs.

    Episodes are played and graded as in iterations, and each finished task is kept: a killed command goes on. The
    result is an artifact, which a second call finds. Tasks that the policy was trained on are named.

    Examples:

        triplane evaluate live --suite 0a1b2c3d

        triplane evaluate quickstart/0003 --split unseen --samples 4 --save unseen4

        triplane evaluate 3f9c2a71 --name unseen4

        triplane evaluate ./Qwen3-4B -e qwen3-4b --suite 0a1b2c3d --greedy

        triplane evaluate http://localhost:8000/v1 --tokenizer ./Qwen3-4B --name unseen4
    """
    store = open_store()
    settings = (suite, split, samples, greedy or None, experiment, overrides or None, save)
    _require_fitting(policy, name, tokenizer, model, settings)
    with stoppable():
        from curation.tasks.importing.find import find_suite
        from ops.named_evaluations import evaluate_policy, played_tasks, reading_of, settings_for
        from resources.experiment import load_experiment
        from triplane_dagster.cli.playing import playing

        wanted: Experiment | None = None
        if name is not None:
            evaluation = named_evaluation(name)
        else:
            wanted = load_experiment(file_in_store(store, experiment or _experiment_of(policy)), overrides)
            found = chosen_suite(store, wanted, suite).ref
            evaluation = _evaluation_of(wanted, save or UNSAVED, found.digest, split, samples, greedy=greedy)
        tasks = find_suite(store, evaluation.suite)
        count = len(played_tasks(tasks, evaluation.split))
        played, chosen = _chosen(store, policy, wanted, evaluation, tokenizer, model, dry_run=dry_run)
        with_policy = settings_for(played, chosen)
        if dry_run:
            work = reading_of(played).work(store, with_policy, chosen.ref, tasks.ref)
            _print_plan(work, count, played, as_json=as_json)
            return
        if save is not None:
            typer.echo(f"{_save(evaluation)} has these settings: triplane evaluate POLICY --name {save}", err=True)
        with playing(store, with_policy, "evaluation") as opened:
            run = evaluate_policy(opened, played, chosen, tasks)
    show_result(run, as_json=as_json)


def _require_fitting(
    policy: str, name: str | None, tokenizer: Path | None, model: str | None, settings: tuple[object, ...]
) -> None:
    """Refuse options that contradict each other, or have no effect. Raises ConfigError."""
    from ops.policies import is_url

    if name is not None and any(each is not None for each in settings):
        raise ConfigError(
            f"--name {name} says what is measured: leave out --suite, --split, --experiment and the like, or --name"
        )
    if not is_url(policy) and (tokenizer or model):
        raise ConfigError(f"--tokenizer and --model are for the URL of a server, POLICY is {policy!r}: leave them out")


def _experiment_of(policy: str) -> str:
    """Experiment whose settings are meant if none is named."""
    from ops.policies import is_folder, is_url

    return "quickstart" if is_url(policy) or is_folder(policy) else policy.rpartition("/")[0] or "quickstart"


def _evaluation_of(
    experiment: Experiment, name: str, suite: str, split: Split | None, samples: int | None, *, greedy: bool
) -> Evaluation:
    from pydantic import ValidationError

    from resources.evaluation import Evaluation
    from resources.overrides import explain

    try:
        return Evaluation.of(experiment, name, suite, split or Split.HELD_OUT, samples, greedy=greedy)
    except ValidationError as error:
        raise ConfigError(explain(error, Evaluation, "evaluation")) from None


def _chosen(
    store: Store,
    policy: str,
    experiment: Experiment | None,
    evaluation: Evaluation,
    tokenizer: Path | None,
    model: str | None,
    *,
    dry_run: bool,
) -> tuple[Evaluation, Artifact]:
    """The policy, and the evaluation with the engine that serves it."""
    from inference.engines.config import OUTSIDE_POLICY, OpenAIConfig
    from ops.policies import is_folder, is_url, outside_policy, stored_policy

    if dry_run and (is_url(policy) or is_folder(policy)):
        raise ConfigError(f"--dry-run writes nothing, and {policy} is yet to be put into {store.url}: leave it out")
    if is_url(policy):
        server = OpenAIConfig(base_url=policy)
        found = outside_policy(store, server, model, tokenizer)
        if found.ref.kind == OUTSIDE_POLICY:
            return evaluation.model_copy(update={"engine": server}), found
        typer.echo(f"{policy} serves policy {found.ref.short} of this store, which is sampled here", err=True)
        return evaluation, found
    if is_folder(policy):
        from trainer.import_hf import import_checkpoint  # needs torch
        from trainer.precision import DEFAULT

        precision = experiment.trainer.precision if experiment else DEFAULT
        return evaluation, import_checkpoint(Path(policy).expanduser(), store, precision=precision)
    return evaluation, open_artifact(
        store, stored_policy(store, experiment.name if experiment else "quickstart", policy)
    )


def _save(evaluation: Evaluation) -> Path:
    from resources.evaluation import save_evaluation
    from triplane_dagster.experiment_files import evaluations_folder

    path = evaluations_folder() / f"{evaluation.name}.yaml"
    save_evaluation(evaluation, path)
    return path


def _print_plan(work: Work, tasks: int, evaluation: Evaluation, *, as_json: bool) -> None:
    from contracts.parts import Parts
    from ops.evaluation import TABLES

    found = work.find()
    kept = 0 if found else len(Parts(work.store, work.kind, work.key, TABLES.values()).read())
    plan: dict[str, Any] = {
        "policy": work.parents["policy"].digest,
        "suite": work.parents["task_suite"].digest,
        "split": evaluation.split.value,
        "tasks": tasks,
        "episodes": tasks * evaluation.samples,
        "key": work.key,
        "state": "found" if found else f"{kept} tasks kept, {tasks - kept} to play",
        "evaluation": found.ref.digest if found else None,
    }
    if as_json:
        print_json(plan)
        return
    digests = {each: (plan[each] or "")[:12] or None for each in ("policy", "suite", "key", "evaluation")}
    print_rows([plan | digests], as_json=False, title="what would be played (nothing was played)")
