"""Assign imported tasks to splits by shares; the assignment depends on the tasks' ids alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator

from contracts.digests import digest_of
from contracts.tasks import Split
from curation.errors import TaskError

DEFAULT_SHARES = {Split.TRAIN: 0.6, Split.GATE: 0.2, Split.HELD_OUT: 0.2}
"""Its keys are the splits of imported tasks; `unseen` exists only in generated suites."""


def _importable(split: Split) -> Split:
    if split not in DEFAULT_SHARES:
        raise ValueError(f"{split.value} is a split of generated suites only: write train, gate or held_out")
    return split


ImportedSplit = Annotated[Split, AfterValidator(_importable)]
"""Split of an imported task."""


def parse_shares(options: Sequence[str]) -> dict[Split, float]:
    """Shares from texts like "train=0.8"; other splits get 0. None: the default. Raises TaskError."""
    if not options:
        return dict(DEFAULT_SHARES)
    shares = dict.fromkeys(DEFAULT_SHARES, 0.0)
    for option in options:
        name, _, text = option.partition("=")
        try:
            shares[_importable(Split(name.strip()))] = float(text)
        except ValueError:
            known = ", ".join(split.value for split in DEFAULT_SHARES)
            raise TaskError(f"split {option!r} is not NAME=SHARE: write e.g. train=0.8; names are {known}") from None
    total = sum(shares.values())
    if not 0 < total < float("inf") or min(shares.values()) < 0:
        raise TaskError(f"shares of splits {', '.join(options)} must not be negative nor all 0: write e.g. train=0.8")
    return {split: share / total for split, share in shares.items()}


def deal(task_ids: Sequence[str], shares: Mapping[Split, float]) -> dict[str, Split]:
    """Split of each id, with sizes as close to the shares as possible; avoids empty splits."""
    order = sorted(task_ids, key=digest_of)
    counts = {split: int(len(order) * share) for split, share in shares.items()}
    wanted = [split for split in Split if shares.get(split, 0) > 0]
    for _ in range(len(order) - sum(counts.values())):
        counts[max(wanted, key=lambda split: (counts[split] == 0, len(order) * shares[split] - counts[split]))] += 1
    for split in wanted:
        richest = max(wanted, key=lambda each: counts[each])
        if counts[split] == 0 and counts[richest] > 1:
            counts[split], counts[richest] = 1, counts[richest] - 1
    places = [split for split in wanted for _ in range(counts[split])]
    return dict(zip(order, places, strict=True))
