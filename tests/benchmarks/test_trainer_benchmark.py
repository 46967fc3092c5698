"""The trainer benchmark's own parts: programs in turn, the case, and seconds by part."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from benchmarks.result import NotHereError
from benchmarks.trainer import TrainerOptions, run
from benchmarks.trainer_case import Case, read_case, write_case
from benchmarks.trainer_parts import PARTS, PartClock, _resolve
from benchmarks.turns import program
from contracts.errors import ConfigError, TriplaneError
from trainer.model_config import ModelConfig

TINY = ModelConfig(layers=2, experts=2, experts_per_token=1)
ANSWERS = 'import sys; print("{\\"ready\\": true}", flush=True)\nfor line in sys.stdin: '


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Case]]:
    folder = tmp_path_factory.mktemp("case")
    yield folder, write_case(folder, TINY, groups=2, group_size=2, optimizer_steps=2)


def test_a_program_answers_line_by_line() -> None:
    code = ANSWERS + 'print("a warning"); print("{\\"said\\": \\"%s\\"}" % line.strip(), flush=True)'
    with program("it", [sys.executable, "-c", code], os.environ, 30) as running:
        assert [running.do(order)["said"] for order in ("one", "two")] == ["one", "two"]


def test_a_program_that_ends_is_named_with_its_last_words() -> None:
    with program("the peer", [sys.executable, "-c", ANSWERS + 'raise SystemExit("out of luck")'], os.environ, 30) as it:
        with pytest.raises(TriplaneError, match=r"the peer ended with status 1: .*out of luck"):
            it.do("go")


def test_a_silent_program_is_given_up() -> None:
    code = ANSWERS + "import time; time.sleep(60)"
    with program("the peer", [sys.executable, "-c", code], os.environ, 30) as running:
        running._patience = 0.1
        with pytest.raises(TriplaneError, match="the peer was silent"):
            running.do("go")


def test_both_sides_read_the_same_sequences(case: tuple[Path, Case]) -> None:
    folder, written = case
    assert read_case(folder) == written
    assert written.tokens == sum(len(row) for rows in (written.prompts, written.completions) for row in rows)
    assert [len(row) for row in written.logprobs] == [sum(mask) for mask in written.masks]
    assert (folder / "plain" / "config.json").is_file()


def test_every_measured_function_exists() -> None:
    assert [f"{place}.{name}" for place, name, _ in PARTS if not hasattr(_resolve(place), name)] == []


@pytest.mark.slow
def test_parts_add_up_to_the_whole_and_change_no_bit(case: tuple[Path, Case]) -> None:
    command = [sys.executable, "-m", "benchmarks.trainer_ours", str(case[0]), "1"]
    with program("Triplane's trainer", command, os.environ, 300) as running:
        plain, measured = running.do("go"), running.do("parts")
    assert measured["checkpoint"] == plain["checkpoint"]
    assert sum(measured["parts"].values()) == pytest.approx(measured["seconds"], rel=0.05)
    assert {part for _, _, part in PARTS} <= {part.removesuffix(" backward") for part in measured["parts"]}
    assert {"attention backward", "experts backward", "head backward", "projections backward"} <= set(measured["parts"])


def test_a_part_that_no_longer_exists_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.trainer_parts.PARTS", (("trainer.rl", "no_such_function", "loss"),))
    with pytest.raises(TriplaneError, match=r"trainer\.rl has no no_such_function"):
        PartClock().install()


def test_a_clock_gives_the_backward_pass_to_the_part_whose_output_it_enters() -> None:
    clock = PartClock()
    double, square = clock._timed(lambda x: x * 2, "double"), clock._timed(lambda x: x**2, "square")
    leaf = torch.ones(3, requires_grad=True)
    clock.start()
    square(double(leaf)).sum().backward()
    seconds = clock.stop()
    assert set(seconds) == {"other", "double", "square", "double backward", "square backward"}
    assert leaf.grad is not None and leaf.grad.tolist() == [8.0] * 3


def test_wrong_options_and_a_missing_peer_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="not huge"):
        TrainerOptions(shapes="huge")
    with pytest.raises(ValidationError, match="numbers of threads"):
        TrainerOptions(threads="0 2")
    with pytest.raises(ConfigError, match="--optimizer-steps=3 does not divide --groups=64"):
        run(TrainerOptions(optimizer_steps=3))
    with pytest.raises(NotHereError, match="make test-peers"):
        run(TrainerOptions(peers=str(tmp_path / "python")))
