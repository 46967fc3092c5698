"""Import rules: which package may import which, and that no modules import each other in a circle.

A file imports only from its own package or from a lower layer (`LAYERS`).
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.pb import envd_pb2
from contracts.syntax import parse_python

ROOT = Path(__file__).parent.parent
LAYERS = [
    {"contracts", "triplane_kernels"},
    {"envd", "inference", "trainer", "curation"},
    {"resources"},
    {"ops"},
    {"assets"},
    {"triplane_dagster"},
    {"benchmarks"},
]
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
FOLDERS = {
    package: ROOT / ("kernels/triplane_kernels" if package == "triplane_kernels" else package) for package in LEVEL
}
EXCEPTIONS = {
    ("inference", "envd.client"),
    ("inference", "envd.tools"),
    ("curation", "envd.client"),
    ("curation", "envd.tools"),
}
ELSEWHERE = ROOT / "inference" / "engines" / "vllm_side"
"""Runs in vLLM's processes under another name, beside nothing else of ours: there a module can only name its
neighbours.
"""
DAGSTER_LAYERS = {"resources", "ops", "assets", "triplane_dagster", "benchmarks"}


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(parse_python(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            neighbour = node.level == 1 and ELSEWHERE in path.parents
            assert node.level == 0 or neighbour, f"{path}:{node.lineno}: relative import; name the package"
            if not neighbour:
                yield node.module or "", node.lineno


def violation(package: str, imported: str) -> str | None:
    top = imported.split(".")[0]
    if top == "dagster" or (top.startswith("dagster_") and top != "dagster_pipes"):
        return None if package in DAGSTER_LAYERS else "only the top layers import dagster"
    if top not in LEVEL or top == package:
        return None
    if LEVEL[top] < LEVEL[package] or any((package, ".".join(imported.split(".")[:2])) == each for each in EXCEPTIONS):
        return None
    return f"{package} may not import {top}: it is on the same layer or above"


@pytest.mark.parametrize("package", sorted(LEVEL))
def test_package_imports_only_from_lower_layers(package: str) -> None:
    files = sorted(FOLDERS[package].rglob("*.py"))
    assert files, f"{package} has no files"
    found = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}: {reason}"
        for path in files
        for name, line in imports_of(path)
        if (reason := violation(package, name))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("package", "imported", "allowed"),
    [
        ("envd", "inference.engines", False),
        ("inference", "envd.client", True),
        ("inference", "envd.server", False),
        ("trainer", "dagster", False),
        ("trainer", "dagster_pipes", True),
        ("ops", "assets.rollouts", False),
        ("assets", "ops.rollouts", True),
        ("contracts", "envd.client", False),
    ],
)
def test_the_rule_itself(package: str, imported: str, allowed: bool) -> None:
    assert (violation(package, imported) is None) == allowed


@pytest.mark.parametrize(
    ("package", "banned"),
    [
        ("envd", "torch,dagster"),
        ("contracts", "torch,grpc,dagster"),
        ("trainer", "dagster,transformers"),
        ("inference.weights.serve", "torch,grpc,dagster"),
    ],
)
def test_package_stays_light(package: str, banned: str) -> None:
    code = f"import sys, pkgutil, importlib, {package}\n"
    if package == "contracts":
        code += (
            "[importlib.import_module('contracts.' + m.name) for m in pkgutil.iter_modules(contracts.__path__) if"
            " m.name not in ('pb', 'protos')]\n"
        )
    code += f"found = [name for name in '{banned}'.split(',') if name in sys.modules]\nassert not found, found"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_what_runs_in_vllm_needs_nothing_of_ours() -> None:
    found = {name.split(".")[0] for path in sorted(ELSEWHERE.rglob("*.py")) for name, _ in imports_of(path)}
    assert not found & set(LEVEL), "vLLM's environment has none of our packages"
    assert found <= sys.stdlib_module_names | {"torch", "safetensors"}


def module_of(path: str) -> str:
    parts = Path(path).with_suffix("").parts[path.startswith("kernels/") :]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_imports(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """Modules of `known` that a file imports, also inside functions and in an `if TYPE_CHECKING`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in known else node.module


def circle_in(edges: dict[str, set[str]]) -> list[str]:
    """Names that lead back to the first of them; empty where no circle is."""
    left = {name: found - {name} for name, found in edges.items()}
    while leaves := [name for name, found in left.items() if not found & left.keys()]:
        for name in leaves:
            del left[name]
    walk = sorted(left)[:1]
    while walk and walk[-1] not in walk[:-1]:
        walk.append(min(left[walk[-1]] & left.keys()))
    return walk[walk.index(walk[-1]) :] if walk else []


@functools.cache
def import_edges() -> dict[str, set[str]]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    modules = {module_of(path): ROOT / path for path in listed.splitlines() if (ROOT / path).exists()}
    return {
        name: {each for each in module_imports(parse_python(path.read_text()), set(modules)) if each in modules}
        for name, path in modules.items()
    }


def reached_from(start: str, edges: dict[str, set[str]]) -> set[str]:
    reached, left = set(), [start]
    while left:
        found = edges[left.pop()] - reached
        reached |= found
        left += found
    return reached


EPISODE_RPCS = {"PutTemplate", "PutRuntime", "Create", "Get", "Delete", "Batch", "Verify", "Found"}
TRAINING = ("inference", "ops", "curation")


def test_training_path_imports_only_the_client_of_an_episode() -> None:
    edges = import_edges()
    allowed = {"envd.client", "envd.tools", "envd.types"}
    for name in edges:
        if name.split(".")[0] in TRAINING:
            direct = {each for each in edges[name] if each.startswith("envd.")}
            assert direct <= allowed, f"{name} imports {sorted(direct - allowed)}: use envd.client"
    below = {each for name in allowed for each in reached_from(name, edges)}
    assert not {each for each in below if each.startswith(("envd.operations", "envd.server", "envd.backends"))}
    assert "contracts.pb.envd_operations_pb2" not in below


def test_protocol_of_an_episode_stays_small() -> None:
    services = envd_pb2.DESCRIPTOR.services_by_name.values()
    assert {method.name for service in services for method in service.methods} == EPISODE_RPCS


def test_no_circle_of_imports_between_modules() -> None:
    circle = circle_in(import_edges())
    assert not circle, " -> ".join(circle)


def test_no_circle_of_imports_between_packages_of_envd() -> None:
    packages: dict[str, set[str]] = {}
    for name, found in import_edges().items():
        if name.startswith("envd."):
            ours = {".".join(each.split(".")[:2]) for each in found if each.startswith("envd.")}
            packages.setdefault(".".join(name.split(".")[:2]), set()).update(ours)
    circle = circle_in(packages)
    assert not circle, " -> ".join(circle)


def test_import_inside_a_function_counts() -> None:
    source = "if TYPE_CHECKING:\n    import a\ndef f():\n    import b\n    async def g():\n        from c import d, e\n"
    assert list(module_imports(ast.parse(source), {"a", "b", "c", "c.d"})) == ["a", "b", "c.d", "c"]


def test_circle_is_found() -> None:
    assert circle_in({"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": set()}) == ["a", "b", "c", "a"]
    assert circle_in({"a": {"a", "b"}, "b": set()}) == []
