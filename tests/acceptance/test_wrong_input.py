"""Wrong input is one line that names the thing and the fix, with an exit code, and leaves earlier artifacts as they
were: what is quick.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from contracts.architectures import parameter_shapes
from contracts.artifacts import ArtifactWriter, find_artifact, list_artifacts, open_artifact
from contracts.digests import digest_of
from contracts.errors import ArtifactCorrupt, SchemaError, StoreError, TriplaneError
from contracts.store import open_store
from tests.acceptance.laboratory import Laboratory
from tests.acceptance.spoiling import assert_one_line, contents, cut, file_of, flipped, rewrite, run
from tests.acceptance.test_iterations_are_exact import TINY
from tests.cli.cli_history import write_history
from trainer.import_hf import import_checkpoint


@pytest.fixture
def laboratory(tmp_path: Path) -> Laboratory:
    return Laboratory(tmp_path, TINY)


@pytest.fixture
def with_history(laboratory: Laboratory) -> Laboratory:
    """One iteration, by the real writers, of two groups."""
    write_history(open_store(str(laboratory.folder / ".triplane" / "store")))
    return laboratory


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\nrolouts: {}", "bad.yaml: rolouts is not a field: did you mean rollouts?"),
        ("name: x\nrollouts: {group_size: many}", "rollouts.group_size = 'many'"),
        ("name: [", "bad.yaml is not YAML"),
    ],
)
def test_a_malformed_experiment(laboratory: Laboratory, text: str, said: str) -> None:
    (laboratory.folder / "bad.yaml").write_text(text)
    assert_one_line(run(laboratory, "iterate", "-e", "bad.yaml"), said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-e", str(TINY), "--set", "rollouts.nope=1"), "rollouts.nope is not a field: known are carry_over"),
        (("-e", "nosuch"), "no experiment 'nosuch' in"),
        (("-e", str(TINY), "--set", "trainer.launcher.gpus=8"), "gpus=8: this machine has 0 NVIDIA GPU(s)"),
        (
            ("-e", str(TINY), "--set", "trainer.launcher.nodes=2"),
            "nodes=2: the local launcher uses one machine; set it to 1",
        ),
    ],
)
def test_what_can_not_be_run_is_refused_before_anything_is_made(
    laboratory: Laboratory, arguments: tuple[str, ...], said: str
) -> None:
    assert_one_line(run(laboratory, "iterate", "-n", "1", *arguments), said)
    assert contents(laboratory) == {}


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("TRIPLANE_STORE", "{file}", "is not a directory (Not a directory): point TRIPLANE_STORE at one"),
        ("TRIPLANE_STORE", "{file}/below", "is not a directory (Not a directory): point TRIPLANE_STORE at one"),
        ("TRIPLANE_STORE", "ftp://host/x", "unknown scheme 'ftp': use a directory or s3://bucket/prefix"),
        ("DAGSTER_HOME", "{file}", "is not a directory or does not exist"),
        ("DAGSTER_HOME", "relative", "must be an absolute path"),
    ],
)
def test_places_that_are_none(laboratory: Laboratory, variable: str, value: str, said: str) -> None:
    (laboratory.folder / "file").write_text("not a folder")
    laboratory.environment[variable] = value.format(file=laboratory.folder / "file")
    assert_one_line(run(laboratory, "iterate", *laboratory.settings, "-n", "1"), said)


@pytest.mark.parametrize("text", ["storage: {nosuch: 1}", "storage: ["])
def test_a_malformed_dagster_yaml(laboratory: Laboratory, text: str) -> None:
    (laboratory.folder / "dagster.yaml").write_text(text)
    assert_one_line(run(laboratory, "iterate", *laboratory.settings, "-n", "1"), "dagster.yaml is not valid")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"instance_id": 1\n', "rows.jsonl line 1 is not JSON"),
        (b"\xff\xfe\x00", "rows.jsonl is not UTF-8"),
        (None, "rows.jsonl does not exist"),
    ],
)
def test_malformed_rows_of_tasks(laboratory: Laboratory, data: bytes | None, said: str) -> None:
    if data is not None:
        (laboratory.folder / "rows.jsonl").write_bytes(data)
    assert_one_line(run(laboratory, "tasks", "import", "rows.jsonl", "-e", str(TINY)), said)


def test_one_changed_byte_in_any_file_of_any_artifact_is_found(with_history: Laboratory) -> None:
    store, seen = with_history.store, 0
    for artifact in list(list_artifacts(store)):
        for name in artifact.names():
            rewrite(store.local_path(f"{artifact.ref.uri}/{artifact.manifest.attempt}/{name}"), flipped)
            with pytest.raises(
                ArtifactCorrupt, match=rf"{artifact.ref.uri}/{name} does not match its manifest .* run its step again"
            ):
                open_artifact(store, artifact.ref).path(name)
            seen += 1
    assert seen >= 10


def test_a_changed_file_ends_a_command_and_changes_nothing(with_history: Laboratory) -> None:
    rewrite(file_of(with_history, "rewards", "rewards.parquet"), cut)
    before = contents(with_history)
    assert_one_line(
        run(with_history, "episodes", "list", "-e", "tiny"),
        "rewards.parquet does not match its manifest (truncated or changed)",
    )
    assert contents(with_history) == before


def _changed(**values: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | values).encode()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (cut, ArtifactCorrupt, "manifest.json is damaged"),
        (lambda data: b"[]", ArtifactCorrupt, "manifest.json is damaged"),
        (_changed(content_digest="0" * 64), ArtifactCorrupt, "manifest.json was changed"),
        (_changed(action_key="0" * 64), ArtifactCorrupt, "manifest.json was changed"),
        (_changed(files=[]), ArtifactCorrupt, "manifest.json was changed"),
        (
            _changed(schema_version=2, something="new"),
            SchemaError,
            "has schema version 2, this Triplane reads 1: use the Triplane that",
        ),
    ],
)
def test_a_changed_manifest(
    with_history: Laboratory, change: Callable[[bytes], bytes], error: type[TriplaneError], said: str
) -> None:
    (artifact,) = list_artifacts(with_history.store, "dataset")
    rewrite(file_of(with_history, "dataset", "manifest.json"), change)
    with pytest.raises(error, match=said):
        find_artifact(with_history.store, "dataset", artifact.ref.key)
    assert_one_line(run(with_history, "lineage", artifact.ref.digest), f"artifacts/dataset/{artifact.ref.key}", said)


def test_a_table_that_was_committed_as_something_else(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with ArtifactWriter(store, "rewards", digest_of("odd"), parents={}, config={}, code_version="1") as out:
        out.add_bytes("rewards.parquet", b"PAR1 no table PAR1")
        out.add_bytes("facts.json", b"{")
        odd = out.commit()
    with pytest.raises(
        ArtifactCorrupt, match=r"rewards\.parquet is not a Parquet file with these columns .*run its step again"
    ):
        odd.table("rewards.parquet")
    with pytest.raises(ArtifactCorrupt, match=r"facts\.json is not JSON .*run its step again"):
        odd.json("facts.json")


def test_a_disk_that_fills_while_an_artifact_is_staged(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with pytest.raises(StoreError, match="is full: free some space"):
        with ArtifactWriter(store, "rewards", digest_of("full"), parents={}, config={}, code_version="1"):
            raise OSError(28, "No space left on device")
    assert list((tmp_path / "tmp").iterdir()) == []


CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 32,
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 128,
    "max_position_embeddings": 32,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (QUERY, None, rf"has no readable tensor {QUERY}"),
        (QUERY, torch.ones(3, 3), rf"tensor {QUERY} is \(3, 3\), config.json says \(256, 128\): fetch both again"),
        (QUERY, torch.full((256, 128), float("nan")), rf"tensor {QUERY} contains numbers that are not finite"),
    ],
    ids=["absent", "wrong shape", "not finite"],
)
def test_an_import_of_a_checkpoint_with_a_bad_tensor(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, said: str
) -> None:
    tensors = {}
    for each, shape in parameter_shapes(CONFIG).items():
        singles = (
            [each.replace(".experts.", f".experts.{index}.") for index in range(shape[0])]
            if len(shape) == 3
            else [each]
        )
        tensors |= {single: torch.ones(shape[-2:]) for single in singles}
    tensors |= {name: tensor} if tensor is not None else {}
    if tensor is None:
        del tensors[name]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    store = open_store(str(tmp_path / "store"))
    with pytest.raises(TriplaneError, match=said):
        import_checkpoint(tmp_path / "model", store)
    assert list(list_artifacts(store)) == []
