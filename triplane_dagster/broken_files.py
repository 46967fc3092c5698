"""An experiment file that can't be used, as an asset that says why: the other experiments stay usable."""

from __future__ import annotations

import re
from collections.abc import Iterable

import dagster as dg

from assets.naming import OWNERS
from triplane_dagster.experiment_files import BrokenFile

ASSET = "experiment_file"


def broken_assets(broken: Iterable[BrokenFile], taken: Iterable[str]) -> list[dg.AssetsDefinition]:
    """One asset for each file, in a group named after it. taken: groups of the experiments that were loaded."""
    groups, made = set(taken), []
    for each in broken:
        stem = re.sub(r"\W", "_", each.path.stem, flags=re.ASCII)
        group = (
            stem if stem not in groups else next(f"{stem}_{n}" for n in range(2, 10_000) if f"{stem}_{n}" not in groups)
        )
        groups.add(group)
        made.append(_asset(each, group))
    return made


def _asset(broken: BrokenFile, group: str) -> dg.AssetsDefinition:
    @dg.asset(
        key=[group, ASSET],
        group_name=group,
        owners=OWNERS,
        kinds={"yaml"},
        description=f"**This experiment can't be used:** {broken.error}\n\nCorrect the file, then reload definitions.",
    )
    def experiment_file() -> None:
        raise broken.error

    return experiment_file
