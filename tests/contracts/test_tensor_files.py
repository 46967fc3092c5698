"""Tensors in one file or in parts: equal to safetensors' own files, one digest, refused by name when damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from safetensors.torch import save as serialized

from contracts import tensor_parts
from contracts.artifacts import Artifact, ArtifactWriter, open_artifact
from contracts.errors import ArtifactCorrupt, SchemaError
from contracts.store import LocalStore, Store, open_store
from contracts.tensor_files import DTYPES, INDEX, TensorFiles
from contracts.tensor_parts import add_tensors, bytes_of, cut_parts, form_of, write_part

ROOT = Path(__file__).parents[2]
NAME = "model.safetensors"
PART = 6000
"""Bytes of a part in these tests: three tensors of TENSORS fit."""


def drawn(count: int = 10, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {f"layer.{number}.weight": torch.randn(20, 20, generator=random) for number in range(count)}


def stage(store: Store, key: str, tensors: dict[str, torch.Tensor]) -> Artifact:
    forms = {name: form_of(tensor) for name, tensor in tensors.items()}
    with ArtifactWriter(store, "thing", key * 64, parents={}, config={}, code_version="1") as out:
        add_tensors(out, NAME, forms, lambda name: bytes_of(tensors[name]), {"format": "pt"})
        return out.commit()


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parts, "PART_BYTES", PART)


@pytest.fixture
def parts(cut: None, tmp_path: Path) -> Path:
    """A directory with tensors in four parts."""
    return stage(open_store(str(tmp_path / "store")), "a", drawn()).directory()


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
named = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(DTYPES)), shapes),
    max_size=8,
)


@given(named, st.sampled_from([None, {"format": "pt"}]))
@settings(deadline=None)
def test_one_file_is_byte_for_byte_that_of_safetensors(
    tmp_path_factory: pytest.TempPathFactory, forms: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    tensors = {name: torch.ones(shape).to(getattr(torch, DTYPES[dtype][0])) for name, (dtype, shape) in forms.items()}
    path = tmp_path_factory.mktemp("one") / NAME
    part = write_part(path, forms, lambda name: bytes_of(tensors[name]), metadata)
    assert path.read_bytes() == serialized(tensors, metadata=metadata) and part.size == path.stat().st_size
    files = TensorFiles(path.parent, NAME)
    assert files.forms == forms
    assert all(
        torch.equal(files.tensor(name).view(torch.uint8), tensors[name].view(torch.uint8))
        for name in tensors
        if tensors[name].dim()
    )


def test_parts_have_the_digest_and_the_tensors_of_one_file(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, tensors = stage(store, "a", drawn()), drawn()
    assert whole.names() == [NAME]
    monkeypatch.setattr(tensor_parts, "PART_BYTES", PART)
    found = stage(store, "b", tensors)
    files = [f"model-{number:05}-of-00004.safetensors" for number in range(1, 5)]
    assert found.names() == sorted([*files, f"{NAME}{INDEX}"]) and found.ref.digest == whole.ref.digest
    directory = open_artifact(store, found.ref).directory()
    assert all((directory / name).stat().st_size <= PART for name in files)
    index = json.loads((directory / f"{NAME}{INDEX}").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    reader = TensorFiles(directory, NAME)
    assert reader.forms == {name: form_of(tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert torch.equal(reader.tensor(name), tensor)
        assert torch.equal(load_file(directory / index["weight_map"][name])[name], tensor)
    assert stage(store, "c", drawn(seed=1)).ref.digest != found.ref.digest


@given(st.lists(st.integers(1, 3000), max_size=40))
def test_parts_keep_the_order_and_are_as_few_as_it_allows(sizes: list[int]) -> None:
    forms = {f"t{number}": ("U8", (size,)) for number, size in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parts, "PART_BYTES", 2000)
        cuts = cut_parts(forms)
    assert [name for cut in cuts for name in cut] == list(forms)
    taken = [sum(size[0] + len(name) + 128 for name, (_, size) in cut.items()) for cut in cuts]
    assert all(bytes_ <= 2000 or len(cut) == 1 for bytes_, cut in zip(taken, cuts, strict=True))
    firsts = [next(iter(cut.items())) for cut in cuts[1:]]
    assert all(
        bytes_ + size[0] + len(name) + 128 > 2000 for bytes_, (name, (_, size)) in zip(taken, firsts, strict=False)
    )


def file_of(directory: Path, number: int) -> Path:
    path = directory / f"model-{number:05}-of-00004.safetensors"
    path.chmod(0o644)
    return path


def edit_index(directory: Path, edit: Callable[[dict[str, str]], None]) -> None:
    path = directory / f"{NAME}{INDEX}"
    body = json.loads(path.read_text())
    edit(body["weight_map"])
    path.unlink()
    path.write_text(json.dumps(body))


def drop_part(directory: Path) -> None:
    file_of(directory, 2).unlink()


def name_absent(directory: Path) -> None:
    edit_index(directory, lambda places: places.update({"layer.99.weight": "model-00001-of-00004.safetensors"}))


def name_less(directory: Path) -> None:
    edit_index(directory, lambda places: places.pop("layer.4.weight"))  # type: ignore[arg-type,return-value]


def leave_the_folder(directory: Path) -> None:
    edit_index(directory, lambda places: places.update({"layer.0.weight": "../model.safetensors"}))


def repeat(directory: Path) -> None:
    path = file_of(directory, 4)
    save_file(load_file(path) | {"layer.0.weight": torch.zeros(20, 20)}, path)


def truncate(directory: Path) -> None:
    path = file_of(directory, 3)
    path.write_bytes(path.read_bytes()[:-100])


def add_whole_file(directory: Path) -> None:
    save_file(drawn(), directory / NAME)


def break_index(directory: Path) -> None:
    path = directory / f"{NAME}{INDEX}"
    path.unlink()
    path.write_text('{"weight_map": [1')


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (drop_part, r"index\.json names the part model-00002-of-00004\.safetensors, which is missing"),
        (name_absent, r"names tensor layer\.99\.weight in model-00001-of-00004\.safetensors, which lacks it"),
        (name_less, r"00002-of-00004\.safetensors holds tensor layer\.4\.weight, which its index does not name"),
        (leave_the_folder, r"names the part \.\./model\.safetensors, which is missing"),
        (repeat, r"layer\.0\.weight is in two parts, model-00001-of-00004\.safetensors and model-00004-of-00004"),
        (truncate, r"model-00003-of-00004\.safetensors is not a readable .* truncated"),
        (add_whole_file, r"has model\.safetensors and model\.safetensors\.index\.json: remove"),
        (break_index, r"index\.json is not a readable index of tensors"),
    ],
)
def test_damaged_parts_are_refused_by_name(parts: Path, damage: Callable[[Path], None], said: str) -> None:
    damage(parts)
    with pytest.raises(SchemaError, match=said):
        TensorFiles(parts, NAME)


def test_a_part_of_another_checkpoint_is_refused_before_a_tensor_is_read(parts: Path, tmp_path: Path) -> None:
    theirs = stage(LocalStore(tmp_path / "other"), "a", drawn(seed=1)).directory()
    file_of(parts, 2).write_bytes(file_of(theirs, 2).read_bytes())
    files = TensorFiles(parts, NAME)
    assert torch.equal(files.tensor("layer.0.weight"), drawn()["layer.0.weight"])
    with pytest.raises(SchemaError, match=r"model-00002-of-00004\.safetensors does not match its index: .* another"):
        files.tensor("layer.3.weight")
    with pytest.raises(SchemaError, match=r"has no readable tensor layer\.10\.weight"):
        files.tensor("layer.10.weight")


def test_a_changed_part_of_an_artifact_does_not_match_its_manifest(cut: None, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    found = stage(store, "a", drawn())
    path = file_of(found.directory(), 2)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ArtifactCorrupt, match=r"model-00002-of-00004\.safetensors does not match its manifest"):
        open_artifact(store, found.ref).directory()


MEASURE = """
import sys
from pathlib import Path
from contracts import tensor_parts
from contracts.artifacts import ArtifactWriter, open_artifact
from contracts.store import LocalStore
from contracts.tensor_files import TensorFiles
MB = 10**6
tensor_parts.PART_BYTES = 50 * MB
def rss(field): return int(next(l for l in open("/proc/self/status") if l.startswith(field)).split()[1]) * 1024
def reset(): open("/proc/self/clear_refs", "w").write("5"); return rss("VmRSS")
def peak(): return (rss("VmHWM") - before) / MB
forms = {f"t{n}": ("U8", (10 * MB,)) for n in range(30)}
store, before = LocalStore(Path(sys.argv[1])), reset()
with ArtifactWriter(store, "thing", "0" * 64, parents={}, config={}, code_version="1") as out:
    tensor_parts.add_tensors(out, "x.safetensors", forms, lambda name: memoryview(bytes([len(name)]) * 10 * MB))
    found = out.commit().ref
print(peak())
before = reset()
files, target = TensorFiles(open_artifact(store, found).directory(), "x.safetensors"), bytearray(10 * MB)
for name in forms: files.read_into(name, memoryview(target))
print(peak(), len(found and open_artifact(store, found).names()))
"""


def test_writing_and_reading_take_the_memory_of_a_tensor_not_of_the_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    writing, reading, files = map(float, done.stdout.split())
    assert files == 9, "eight parts (a header keeps the fifth tensor out) and the index"
    assert writing < 40 and reading < 40, "300 MB of tensors of 10 MB in parts of 50 MB"
