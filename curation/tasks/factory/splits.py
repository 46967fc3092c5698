"""Assign tasks to splits by file, so that no function and no file is in two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from contracts.digests import digest_of
from contracts.tasks import Split


def deal_files(files: Sequence[str], shares: Mapping[Split, float]) -> dict[str, Split]:
    """Split of each file. files: one entry for each task.

    Sizes come close to the shares, the largest file first; with fewer files than splits, later splits stay empty.
    """
    counts = Counter(files)
    wanted = [split for split in Split if shares.get(split, 0) > 0]
    sizes = dict.fromkeys(wanted, 0)
    places: dict[str, Split] = {}
    order = sorted(counts, key=lambda file: (-counts[file], digest_of(file)))
    for number, file in enumerate(order):
        empty = [split for split in wanted if not sizes[split]]
        left = len(order) - number
        open_ = empty if empty and left <= len(empty) else wanted
        split = max(open_, key=lambda each: (shares[each] * len(files) - sizes[each], -wanted.index(each)))
        places[file] = split
        sizes[split] += counts[file]
    return places
