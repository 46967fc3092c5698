"""Recipes of TransformerEngine: refused without it, and their calls fit its published interface.

The interface is read from source, without running it and without a GPU: from the installed package, or from a folder
that TRANSFORMER_ENGINE_SOURCE names. `pip install --no-deps --target FOLDER transformer-engine` fills one, as `.ci/run`
does. Without either the tests of calls are skipped.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest
import torch
from trainer_world import TINY

import trainer.recipes.te
from trainer.config import RlConfig
from trainer.errors import TrainingConfigError
from trainer.model import Batch, score
from trainer.parameters import Parameters, draw_masters
from trainer.precision import with_precision

PLACES = {
    "Linear": "pytorch/module/linear.py",
    "GroupedLinear": "pytorch/module/grouped_linear.py",
    "autocast": "pytorch/quantization.py",
    "is_fp8_block_scaling_available": "pytorch/quantization.py",
    "is_mxfp8_available": "pytorch/quantization.py",
    "Float8BlockScaling": "common/recipe/__init__.py",
    "MXFP8BlockScaling": "common/recipe/__init__.py",
}
"""Name that we call -> file that defines it."""


def interface() -> Path:
    """Folder of the package's source."""
    named = os.environ.get("TRANSFORMER_ENGINE_SOURCE")
    if named:
        return Path(named) / "transformer_engine"
    found = importlib.util.find_spec("transformer_engine")
    if found is None or not found.submodule_search_locations:
        pytest.skip("TransformerEngine is not installed, and TRANSFORMER_ENGINE_SOURCE names no source of it")
    return Path(found.submodule_search_locations[0])


def calls() -> list[ast.Call]:
    """Every call of `te.<name>` or `recipes.<name>` in our module."""
    tree = ast.parse(Path(trainer.recipes.te.__file__).read_text())
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("te", "recipes", "self._te")
    ]


def defined(source: Path, name: str) -> ast.ClassDef | ast.FunctionDef:
    tree = ast.parse((source / PLACES[name]).read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name)


def arguments(node: ast.ClassDef | ast.FunctionDef, method: str = "__init__") -> list[str]:
    """Parameters by position, without self; fields of a dataclass that has no such method."""
    if isinstance(node, ast.FunctionDef):
        return [each.arg for each in node.args.args + node.args.kwonlyargs]
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == method:
            return [each.arg for each in part.args.args + part.args.kwonlyargs][1:]
    return [
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]


@pytest.mark.parametrize("kind", ["te-float8-block", "te-mxfp8"])
def test_without_transformer_engine_one_line_names_the_extra_and_the_gpu(kind: str) -> None:
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("TransformerEngine is installed")
    config = with_precision(TINY.hf_config(96), RlConfig(precision={"kind": kind}).precision)
    parameters = Parameters.from_masters(config, draw_masters(config, 0))
    batch = Batch(torch.arange(8), torch.arange(7), torch.arange(1, 8), torch.zeros(7, dtype=torch.int64), [8])
    with pytest.raises(TrainingConfigError, match=r"triplane\[te\].*(Hopper|Blackwell) GPU.*fp8-block") as caught:
        score(parameters.leaves, parameters.config, batch)
    assert kind in str(caught.value) and "\n" not in str(caught.value)


def test_every_name_that_we_call_is_checked() -> None:
    assert {call.func.attr for call in calls() if isinstance(call.func, ast.Attribute)} == set(PLACES)


def test_calls_fit_the_published_interface() -> None:
    source = interface()
    for call in calls():
        assert isinstance(call.func, ast.Attribute)
        known = arguments(defined(source, call.func.attr))
        assert len(call.args) <= len(known), ast.unparse(call)
        taken = set(known[len(call.args) :])
        unknown = [keyword.arg for keyword in call.keywords if keyword.arg not in taken]
        assert not unknown, f"{ast.unparse(call)}: {unknown} are not among {known}"


def test_positions_and_fields_that_we_use_are_published() -> None:
    source = interface()
    assert arguments(defined(source, "Linear"))[:2] == ["in_features", "out_features"]
    assert arguments(defined(source, "GroupedLinear"))[:3] == ["num_gemms", "in_features", "out_features"]
    assert arguments(defined(source, "GroupedLinear"), "forward")[:2] == ["inp", "m_splits"]
    assert arguments(defined(source, "Linear"), "forward")[0] == "inp"
    assert "use_f32_scales" in arguments(defined(source, "Float8BlockScaling"))
    exported = (source / "pytorch/__init__.py").read_text()
    for name, place in PLACES.items():
        assert place.startswith("common") or f"import {name}\n" in exported, name
    assert 'f"weight{i}"' in (source / PLACES["GroupedLinear"]).read_text()
    assert 'self.weight_names = ["weight"]' in (source / PLACES["Linear"]).read_text()
