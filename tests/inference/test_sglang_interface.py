"""Every route and field that the client uses exists in the real SGLang 0.5.23: its source is read, and only the
publisher of its cache events runs.

The wheel comes from PyPI (39 MB), or SGLANG_SOURCE names a folder with the package `sglang`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from inference.engines import SamplingParams, SglangConfig, open_engine
from inference.engines import sglang as client
from inference.errors import EngineError
from tests.inference.conftest import write_checkpoint
from tests.inference.sglang_server import GETS, serving
from tests.inference.test_cache_events import PROMPT, SIZE, cached, events_port, followed, reached

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
VERSION = "0.5.23"
BODIES = {
    "/generate": ("managers/io_struct.py", "GenerateReqInput"),
    "/pause_generation": ("managers/io_struct.py", "PauseGenerationReqInput"),
    "/continue_generation": ("managers/io_struct.py", "ContinueGenerationReqInput"),
    "/update_weights_from_disk": ("managers/io_struct.py", "UpdateWeightFromDiskReqInput"),
    "/update_weight_version": ("managers/io_struct.py", "UpdateWeightVersionReqInput"),
}
"""Route -> (file, class) of its body."""
READ = {
    "managers/scheduler.py": ("max_req_input_len",),
    "arg_groups/field_order.py": ("enable_deterministic_inference", "enable_fp32_lm_head", "sampling_mask_max_tokens"),
    "entrypoints/http_server.py": ("weight_version",),
    "managers/tokenizer_manager.py": (
        "output_ids",
        "meta_info",
        "finish_reason",
        "weight_version",
        "output_token_logprobs",
        "input_token_logprobs",
        "output_token_sampling_mask",
        "output_token_sampling_logprobs",
    ),
    "utils/weight_versions.py": ("weight_versions", "version", "start", "end"),
}
"""File -> strings with which it makes what the client reads or names."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of `sglang/srt`."""
    if named := os.environ.get("SGLANG_SOURCE"):
        return Path(named) / "sglang" / "srt"
    folder = tmp_path_factory.mktemp("sglang")
    binary = ("--only-binary=:all:", "--python-version", "3.11", "--platform", "manylinux_2_34_x86_64")
    wanted = (f"sglang=={VERSION}", "--no-deps", "--dest", str(folder))
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *binary, *wanted], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    return folder / "sglang" / "srt"


@pytest.fixture
async def sent(tmp_path: Path) -> list[tuple[str, Any]]:
    """Requests of a client that does everything."""
    folders = [write_checkpoint(tmp_path / str(seed), seed) for seed in range(2)]
    with serving(folders[0]) as server:
        settings = SglangConfig(kind="sglang", base_url=server.address, unmatched="warn", tolerance=1e-3)
        engine = open_engine(settings, folders[0], "a" * 64)
        await engine.generate([1, 2], SamplingParams(1.0, 4, seed=1, stop_token_ids=(3,)))
        await engine.generate([1, 2], SamplingParams(1.0, 4, seed=1, top_p=0.9))
        with contextlib.suppress(EngineError):  # whose policy has no tokenizer
            await engine.generate([1, 2], SamplingParams(1.0, 4, seed=1, grammar="{}"))
        await engine.load_weights(folders[1], "b" * 64)
        await engine.score([1, 2, 3])
        await engine.close()
        return server.calls


def fields(source: Path, file: str, name: str) -> dict[str, ast.AnnAssign]:
    """Fields of a class, with their annotations."""
    tree = ast.parse((source / file).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {
        node.target.id: node
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def routes(source: Path) -> set[tuple[str, str]]:
    """(method, path) of the HTTP server."""
    found = set()
    for node in ast.walk(ast.parse((source / "entrypoints/http_server.py").read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "app":
            continue
        path = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
        methods = [ast.literal_eval(each.value) for each in node.keywords if each.arg == "methods"]
        for method in methods[0] if methods else [node.func.attr.upper()]:
            found.add((method, str(path)))
    return found


async def test_every_route_and_field_that_we_send_is_the_servers(source: Path, sent: list[tuple[str, Any]]) -> None:
    known = routes(source)
    assert {("GET", path) for path in GETS} <= known
    assert {path for path, _ in sent} == set(BODIES), "the session uses every route"
    for path, body in sent:
        assert ("POST", path) in known, path
        unknown = set(body) - set(fields(source, *BODIES[path]))
        assert not unknown, f"{path}: {unknown}"
    assert any("structural_tag" in body["sampling_params"] for path, body in sent if path == "/generate")
    sampling = set().union(*(body["sampling_params"] for path, body in sent if path == "/generate"))
    assert sampling - set(fields(source, "sampling/sampling_params.py", "SamplingParams")) == set()
    mode = ast.unparse(fields(source, *BODIES["/pause_generation"])["mode"].annotation)
    assert "'abort'" in mode


def test_what_we_read_is_what_the_server_writes(source: Path) -> None:
    for file, wanted in READ.items():
        text = (source / file).read_text()
        strings = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
        assert set(wanted) - strings == set(), file
    finished = (source / "managers/schedule_batch.py").read_text()
    for reason in client._REASONS:
        assert f'"type": "{reason}"' in finished


async def test_events_of_the_servers_own_publisher_are_followed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.runtime_context"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    setattr(sys.modules["sglang.srt.runtime_context"], "get_parallel", None)  # noqa: B010 - a module lacks the name
    load(source, "utils/network", monkeypatch)
    events = load(source, "disaggregation/kv_events", monkeypatch)
    port = events_port()
    options = {"publisher": "zmq", "endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{port + 1}"}
    publisher = events.EventPublisherFactory.create(events.KVEventsConfig(**options).model_dump_json())

    def stored(blocks: list[int], parent: int | None, start: int, salt: str) -> Any:
        tokens = PROMPT[start * SIZE : (start + len(blocks)) * SIZE]
        return events.BlockStored(blocks, parent, tokens, SIZE, None, "GPU", salt)

    try:
        publisher.publish(events.KVEventBatch(1.0, [stored([5, -6], None, 0, "v1"), stored([8], None, 0, "v0")]))
        router, subscriptions = followed(port)
        await reached(lambda: cached(router) == 2 * SIZE)
        publisher.publish(events.KVEventBatch(2.0, [stored([7], -6, 2, "v1")]))
        await reached(lambda: cached(router) == 3 * SIZE)
        publisher.publish(events.KVEventBatch(3.0, [events.BlockRemoved([-6], "GPU")]))
        await reached(lambda: cached(router) == SIZE)
        publisher.publish(events.KVEventBatch(4.0, [events.AllBlocksCleared()]))
        await reached(lambda: cached(router) == 0)
        await subscriptions.close()
    finally:
        publisher.shutdown()


def load(source: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the server's source."""
    name = f"sglang.srt.{path.replace('/', '.')}"
    spec = importlib.util.spec_from_file_location(name, source / f"{path}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module
