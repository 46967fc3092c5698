"""Engines of a function that the experiment names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from inference.engines import BuiltinConfig, CustomConfig, Engine, SamplingParams, open_engine
from inference.engines.builtin import BuiltinEngine

PARAMS = SamplingParams(temperature=1.0, max_tokens=8, seed=5)


def one_thread(options: dict[str, Any], directory: Path, version: str) -> Engine:
    return BuiltinEngine(directory, version, threads=1, **options)


@pytest.mark.anyio
async def test_an_engine_of_a_named_function_serves_the_policy(
    tmp_path: Path, checkpoint_writer: Callable[..., Path]
) -> None:
    directory = checkpoint_writer(tmp_path / "policy", 0)
    custom = CustomConfig(kind="custom", factory=f"{__name__}:one_thread", options={"max_batch": 4})
    ours, usual = open_engine(custom, directory, "first"), open_engine(BuiltinConfig(threads=1), directory, "first")
    assert await ours.generate([5, 6, 7], PARAMS) == await usual.generate([5, 6, 7], PARAMS)
    await ours.close()
    await usual.close()


@pytest.mark.parametrize("factory", ["no_such_package:open_engine", "inference.engines.openai:no_such_name"])
def test_an_engine_that_can_not_be_imported_is_refused_with_the_experiment(factory: str) -> None:
    with pytest.raises(ValidationError, match=f"engine.factory={factory}: .*: name a function as package.module:name"):
        CustomConfig(kind="custom", factory=factory)
