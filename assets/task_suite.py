"""task_suite: tasks proven in sandboxes: hidden tests fail before the fix and pass after it, and cheats score
nothing.
"""

import dagster as dg

from assets.naming import check, declared, define
from contracts.artifacts import Artifact
from ops.graph import TASK_SUITE
from ops.health import checked
from ops.readings import empty_splits
from ops.results import Materialized, markdown_table, numbers, result, table_facts
from ops.step import begin
from ops.task_suite import make_suite
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.sandboxes import SandboxesResource
from resources.store import StoreResource

CHECK = "every_split_has_tasks"
CARD = "card.json"
"""File of a suite that `triplane tasks make` made."""


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""
    spec = declared(experiment, TASK_SUITE.name)

    @define(
        experiment,
        spec,
        kinds={"parquet", "pytest"},
        description=(
            "Small repositories to repair, in the splits train, gate, held_out and unseen, validated in sandboxes."
        ),
        checks=[check(experiment, spec, CHECK, "Every split that is used has tasks.", blocking=True)],
    )
    def task_suite(
        context: dg.AssetExecutionContext,
        store: StoreResource,
        sandboxes: SandboxesResource,
        progress: dg.ResourceParam[ProgressSink],
    ) -> Materialized:
        suite = make_suite(begin(context, experiment, spec, store.open(), progress), sandboxes)
        table = suite.table("tasks.parquet", columns=["task_id", "family", "split", "instruction"])
        splits = suite.meta["splits"]
        empty = empty_splits(experiment, splits)
        why = f"No task is in {' and '.join(empty)}." if empty else "Every split that is used has tasks."
        stride = max(1, table.num_rows // 12)
        metadata = {
            "samples": markdown_table(table.to_pylist()[::stride][:12]),
            **table_facts(suite.table("tasks.parquet")),
            **numbers({f"tasks {split}": count for split, count in splits.items()}),
            **_yields(suite),
        }
        return result(suite, metadata, [checked(CHECK, not empty, why, splits=splits)])

    return task_suite


def _yields(suite: Artifact) -> dict[str, dg.MetadataValue]:
    """What the strategies of a made suite gave, and why candidates were left out; nothing for other suites."""
    if CARD not in suite.names():
        return {}
    card = suite.json(CARD)
    strategies = [{"strategy": name, **counts} for name, counts in card["strategies"].items()]
    left_out = [{"reason": reason, "candidates": count} for reason, count in card["left_out"].items()]
    unused = [{"test": test, "cause": cause[:200]} for test, cause in card["tests"]["unused"].items()]
    tables = {"yields": strategies, "left out": left_out, "unused tests": unused[:50]}
    texts = {"source": dg.MetadataValue.text(card["source"]), "licence": dg.MetadataValue.text(card["licence"])}
    return texts | {name: markdown_table(rows) for name, rows in tables.items() if rows}
