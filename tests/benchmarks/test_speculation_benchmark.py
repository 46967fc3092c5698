"""The benchmark of speculation compares every turn of every repetition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.speculation import Run, count_differing
from contracts.supports import Supports
from inference.engines.base import Completion


def completion(**changes: object) -> Completion:
    none = np.zeros(0, np.int32)
    same = Completion([1], [-0.5], [("v", 0, 1)], "stop", supports=Supports(none, none, np.zeros(0, np.bool_), none))
    return replace(same, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("repetition", [0, 1])
@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [2]},
        {"logprobs": [-0.25]},
        {"finish_reason": "length"},
        {"supports": Supports(*(np.zeros(1, kind) for kind in (np.int32, np.int32, np.bool_, np.int32)))},
    ],
)
def test_turn_that_differs_in_any_repetition_counts(repetition: int, changes: dict[str, object]) -> None:
    def runs() -> list[Run]:
        return [Run([completion(), completion()], 1.0, 1) for _ in range(2)]

    drafts, plain = runs(), runs()
    assert count_differing(drafts, plain) == 0
    drafts[repetition].completions[1] = completion(**changes)
    assert count_differing(drafts, plain) == 1


def test_support_that_names_what_it_leaves_out_differs_from_one_that_names_members() -> None:
    one = np.ones(1, np.int32)
    members, rest = (Supports(one * 0, one, np.array([left_out]), one) for left_out in (False, True))
    drafts, plain = (Run([completion(supports=each)], 1.0, 1) for each in (members, rest))
    assert count_differing([drafts], [plain]) == 1
