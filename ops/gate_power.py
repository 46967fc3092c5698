"""Power of the gate: how often the promotion rule of an experiment refuses a candidate of a given true difference."""

from __future__ import annotations

from dataclasses import replace

from contracts.artifacts import Artifact, open_artifact
from contracts.store import Store
from contracts.tasks import Split
from curation.power import ASSUMED, Gate, TaskRates, measured_rates, refusal_rate, simulate_iterations
from curation.statistics import solved_by_task
from curation.tasks.suite import TaskSuiteConfig
from ops.loading import load_tasks, split_tasks
from resources.experiment import Experiment
from resources.refs import partitions, read_artifact

LOSS = 0.03
"""True loss of pass rate whose refusal rate is printed beside that of the margin."""
ENOUGH = 0.05
"""Largest share of equal candidates that a gate with enough samples may refuse."""
SAMPLES = (1, 2, 4, 8, 16, 32, 64)
"""Samples per task to try."""


def gate_note(store: Store, experiment: Experiment) -> str:
    """Refusal rates of the gate by true difference, with their assumptions, as text."""
    tasks = _gate_tasks(store, experiment)
    if tasks is None or tasks < 2:
        found = "is not imported yet" if tasks is None else f"has {tasks} gate task(s)"
        return f"gate: power unknown, the task suite {found}"
    rule = experiment.promotion
    gate = Gate(tasks, experiment.evaluation.gate_samples, rule.margin, rule.confidence)
    rates = _rates(store, experiment)
    losses = sorted({0.0, LOSS, rule.margin, 2 * rule.margin})
    shares = ", ".join(f"a true {-100 * loss or 0:.3g} in {refusal_rate(gate, rates, -loss):.0%}" for loss in losses)
    wanted = _samples_wanted(gate, rates)
    many = simulate_iterations(gate, rates, [-LOSS] * experiment.iterations)
    even = simulate_iterations(gate, rates, [0.0] * experiment.iterations)
    return (
        f"gate: with {gate.tasks} tasks x {gate.samples} samples and a margin of {100 * gate.margin:g} points this gate"
        f" refuses {shares} of cases, where the parent is the best policy so far; {wanted} would refuse at most"
        f" {ENOUGH:.0%} of equal candidates. Over {experiment.iterations} iterations that each truly lose"
        f" {100 * LOSS:g} points it lets more than the margin be lost in {many.beyond:.0%} of cases"
        f" ({100 * many.loss:.1f} points on average); of candidates that are truly as good as the live policy it then"
        f" refuses {even.refused:.0%}, since one run of the live policy judges them all. Task rates {rates.origin}"
        f" (mean {rates.mean:.0%}, standard deviation {rates.deviation:.0%})."
    )


def _samples_wanted(gate: Gate, rates: TaskRates) -> str:
    """Smallest power of two of samples per task at which at most ENOUGH of equal candidates are refused."""
    for samples in SAMPLES:
        if refusal_rate(replace(gate, samples=samples), rates, 0.0, trials=2000) <= ENOUGH:
            return f"{samples} sample(s) a task"
    return f"no number of samples up to {SAMPLES[-1]} a task"


def _gate_tasks(store: Store, experiment: Experiment) -> int | None:
    if isinstance(experiment.tasks, TaskSuiteConfig):
        return experiment.tasks.gate
    suite = read_artifact(store, experiment.name, "task_suite")
    return len(split_tasks(load_tasks(store, suite.ref), Split.GATE)) if suite else None


def _rates(store: Store, experiment: Experiment) -> TaskRates:
    """Task rates of the last evaluation's parent, or assumed rates if there is none."""
    evaluated = partitions(store, experiment.name, "evaluation")
    evaluation = read_artifact(store, experiment.name, "evaluation", evaluated[-1]) if evaluated else None
    ref = evaluation.manifest.parents.get("parent_gate") if evaluation else None
    if ref is None or evaluation is None:
        return ASSUMED
    run: Artifact = open_artifact(store, ref)
    policy = run.manifest.parents["policy"].digest[:12]
    outcomes = solved_by_task(run.table("rewards.parquet", ["task_id", "solved"]))
    origin = f"as policy {policy} showed them on the gate in iteration {evaluated[-1]}"
    return measured_rates(outcomes, origin) or TaskRates(
        ASSUMED.mean, ASSUMED.deviation, "assumed: spread evenly from 0 to 100%, since one sample a task does not tell"
    )
