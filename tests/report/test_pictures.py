"""The small pictures on the asset page draw the iterations in their order."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any
from xml.etree import ElementTree

import pytest

from ops.report.chart import loss_picture, reward_picture

ROWS = [
    {"iteration": f"{number:04d}", "train": {"reward": reward}, "training": {"loss": -reward}}
    for number, reward in enumerate((0.25, 0.5, 1.0))
]


def drawn(picture: str) -> tuple[list[tuple[float, float]], set[str | None]]:
    """The places of the only curve, and all texts."""
    image = ElementTree.fromstring(base64.b64decode(picture.partition("base64,")[2]))
    (line,) = (each.get("points", "") for each in image.iter() if each.tag.endswith("polyline"))
    places = [(float(x), float(y)) for x, y in (each.split(",") for each in line.split())]
    return places, {each.text for each in image.iter() if each.tag.endswith("text")}


@pytest.mark.parametrize(
    ("picture", "marks", "rises"),
    [(reward_picture, {"0.25", "0.625", "1", "reward mean"}, True), (loss_picture, {"-1", "-0.25", "loss"}, False)],
)
def test_a_curve_runs_from_the_first_iteration_to_the_last(
    picture: Callable[[Sequence[dict[str, Any]]], str], marks: set[str], rises: bool
) -> None:
    places, texts = drawn(picture(ROWS))
    assert marks | {"0000", "0002"} <= texts
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    heights = [-y for _, y in places]
    assert heights == sorted(heights, reverse=not rises)


def test_a_constant_number_and_no_number_are_drawn() -> None:
    places, _ = drawn(reward_picture(ROWS[:1]))
    assert len(places) == 1
    assert reward_picture([{"iteration": "0000", "train": None, "training": None}]) == ""
    assert loss_picture([{"iteration": "0000", "train": None, "training": {"optimizer_steps": 0}}]) == ""
