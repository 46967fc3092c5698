"""Placement of model servers on GPUs and MIG slices, against an exhaustive search and a bound."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from contracts.errors import ConfigError, SchemaError
from inference.engines.vllm_memory import token_bytes
from inference.placement.fleet import Capacity, Fleet
from inference.placement.mig import KINDS, POSITIONS, Kind, layouts
from inference.placement.solver import Placement, place

GIB = 2**30
SHAPE = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
"""128 KiB a token at two bytes a number."""
FP8 = {"quant_method": "fp8"}
ONE = [{"kind": "H100-80GB", "count": 1}]


def write_model(folder: Path, weights: int, shape: Mapping[str, Any] = SHAPE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": weights}}))
    return folder


def read(folder: Path, gpus: list[dict[str, Any]], services: Mapping[str, dict[str, Any]]) -> Fleet:
    (folder / "fleet.yaml").write_text(yaml.safe_dump({"gpus": gpus, "services": dict(services)}))
    return Fleet.read(folder / "fleet.yaml")


def solve(fleet: Fleet) -> Placement:
    return place(fleet, {name: Capacity(each) for name, each in fleet.services.items()})


def drawn(folder: Path, dice: random.Random, gpus: list[dict[str, Any]]) -> Fleet:
    """A fleet with random services on these GPUs."""
    services: dict[str, dict[str, Any]] = {}
    for name in ("policy", "judge", "draft")[: dice.randint(1, 3)]:
        write_model(folder / name, int(dice.choice((0.5, 1, 2, 4, 8, 15, 30, 60, 90)) * GIB))
        services[name] = {
            "model": name,
            "context": dice.choice((2048, 8192, 32768)),
            "sequences": dice.choice((1, 4, 16, 100, 1000)),
            "servers": dice.choice((0, 0, 1, 2, 5)),
            "value": dice.choice((1.0, 1.0, 2.5)),
            "tensor_parallel": dice.choice(([1], [1, 2], [2], [8], [1, 2, 4, 8])),
            "slices": dice.random() < 0.9,
            "per_gpu": dice.choice((None, 7, 25, 40)),
        }
    return read(folder, gpus, services)


def reached(kind: Kind, capacities: list[Capacity], position: int, memo: dict[int, set[tuple[int, ...]]]) -> Any:
    """Everything that one divided GPU can hold from `position` on: sequences of each service, then servers of each."""
    count = len(capacities)
    if position >= POSITIONS:
        return {(0,) * (2 * count)}
    if position not in memo:
        found = set(reached(kind, capacities, position + 1, memo))
        for profile in kind.profiles:
            for number, capacity in enumerate(capacities):
                if position in profile.starts and (held := capacity.on_slice(kind, profile)):
                    for rest in reached(kind, capacities, position + profile.positions, memo):
                        found.add(added(rest, number, held, count))
        memo[position] = {capped(each, capacities) for each in found}
    return memo[position]


def added(state: tuple[int, ...], number: int, held: int, count: int) -> tuple[int, ...]:
    changed = list(state)
    changed[number] += held
    changed[count + number] += 1
    return tuple(changed)


def capped(state: tuple[int, ...], capacities: list[Capacity]) -> tuple[int, ...]:
    most = [each.service.sequences for each in capacities] + [each.service.servers for each in capacities]
    return tuple(min(each, bound) for each, bound in zip(state, most, strict=True))


def exhaustive(fleet: Fleet) -> float | None:
    """Most value on two GPUs, by trying everything; None if the fewest servers do not fit."""
    capacities = [Capacity(each) for each in fleet.services.values()]
    count, empty = len(capacities), (0,) * (2 * len(capacities))
    singles: list[NDArray[np.int64]] = []
    pairs = [empty]
    for gpus in fleet.gpus:
        kind = gpus.described
        options = set(reached(kind, capacities, 0, {}))
        for number, capacity in enumerate(capacities):
            if 1 in capacity.service.tensor_parallel and (held := capacity.on_gpus(kind, 1)):
                options.add(capped(added(empty, number, held, count), capacities))
            if gpus.count == 2 and 2 in capacity.service.tensor_parallel and (held := capacity.on_gpus(kind, 2)):
                pairs.append(capped(added(empty, number, held, count), capacities))
        singles += [np.array(sorted(options))] * gpus.count
    first, second = singles
    both = (first[:, None, :] + second[None, :, :]).reshape(-1, 2 * count)
    states = np.concatenate([both, np.array(pairs)])
    sequences = np.minimum(states[:, :count], [each.service.sequences for each in capacities])
    enough = (states[:, count:] >= [each.service.servers for each in capacities]).all(axis=1)
    values = (sequences * np.array([each.service.value for each in capacities])).sum(axis=1)[enough]
    return float(values.max()) if len(values) else None


def compare(folder: Path, seed: int) -> bool:
    """Compare one random fleet of two GPUs. Returns whether anything fits."""
    dice = random.Random(seed)
    kinds = dice.choices(sorted(KINDS), k=2)
    entries = [{"node": node, "kind": kind, "count": 1} for node, kind in zip("ab", kinds, strict=True)]
    gpus = dice.choice(([{"kind": kinds[0], "count": 2}], entries))
    fleet = drawn(folder, dice, gpus)
    best = exhaustive(fleet)
    if best is None:
        with pytest.raises(ConfigError, match="fit"):
            solve(fleet)
        return False
    found = solve(fleet)
    assert found.value == pytest.approx(best), seed
    assert found.bound >= best - 1e-6
    require_legal(found, fleet)
    return True


def require_legal(found: Placement, fleet: Fleet) -> None:
    """No slice overlaps another or begins where it may not, and no GPU is used twice."""
    taken: set[tuple[str, int, int]] = set()
    for server in found.servers:
        entry = next(each for each in fleet.gpus if each.node == server.node)
        positions = range(POSITIONS)
        if server.profile is not None:
            assert server.start is not None
            profile = next(each for each in entry.described.profiles if each.name == server.profile)
            assert server.start in profile.starts
            positions = range(server.start, server.start + profile.positions)
        cells = {(server.node, gpu, position) for gpu in server.gpus for position in positions}
        assert not cells & taken and all(0 <= gpu < entry.count for gpu in server.gpus)
        taken |= cells
    assert found.gpus == len({cell[:2] for cell in taken})


@pytest.mark.parametrize("part", range(4))
def test_two_gpus_are_used_as_an_exhaustive_search_uses_them(part: int, tmp_path: Path) -> None:
    assert sum(compare(tmp_path / str(seed), seed) for seed in range(20 * part, 20 * part + 20)) > 5


@pytest.mark.slow
def test_500_random_fleets_of_two_gpus(tmp_path: Path) -> None:
    fitting = sum(compare(tmp_path / str(seed), seed) for seed in range(1000, 1500))
    print(f"{fitting} of 500 fleets fit")
    assert fitting > 200


@pytest.mark.parametrize("seed", range(3))
def test_64_gpus_reach_97_percent_of_what_the_relaxation_bounds(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    gpus = [{"node": f"n{number}", "kind": dice.choice(sorted(KINDS)), "count": 8} for number in range(8)]
    fleet = drawn(tmp_path, dice, gpus)
    services = {
        name: each.model_copy(update={"sequences": 20_000, "tensor_parallel": (1, 2, 4, 8)})
        for name, each in fleet.services.items()
    }
    found = solve(fleet.model_copy(update={"services": services}))
    require_legal(found, fleet)
    assert found.value >= 0.97 * found.bound > 0


def test_a_gpu_has_the_layouts_that_nvidia_lists() -> None:
    """Source: Multi-Instance GPU User Guide, A100: seven of 1g; 4g and 3g; three of 2g and one of 1g; and so on."""
    found = {tuple(profile.name for profile, _ in layout) for layout in layouts(KINDS["A100-40GB"])}
    assert ("1g.5gb",) * 7 in found
    assert ("4g.20gb", "3g.20gb") in found and ("3g.20gb", "3g.20gb") in found
    assert ("2g.10gb", "2g.10gb", "2g.10gb", "1g.10gb") in found
    assert all(sum(profile.processors for profile, _ in layout) <= 7 for layout in layouts(KINDS["H200-141GB"]))
    for layout in layouts(KINDS["A100-40GB"]):
        for (profile, start), (_, after) in itertools.pairwise(layout):
            assert start + profile.positions <= after


def test_bytes_of_a_token_by_hand() -> None:
    assert token_bytes(SHAPE, 1, 2) == 2 * 32 * 8 * 128 * 2
    assert token_bytes(SHAPE, 4, 1) == 2 * 32 * 2 * 128
    assert token_bytes(SHAPE, 16, 2) == 2 * 32 * 1 * 128 * 2  # heads are copied
    deepseek_v3 = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert token_bytes(deepseek_v3, 8, 2) == 70_272  # DeepSeek-V3's report: 70 KB a token
    with pytest.raises(SchemaError, match="num_hidden_layers"):
        token_bytes({"num_attention_heads": 2, "head_dim": 4}, 1, 2)


def test_an_fp8_mixture_is_not_divided_where_vllm_refuses_it(tmp_path: Path) -> None:
    """Experts of width 768 in blocks of 128 go on 1, 2, 3 or 6 GPUs."""
    write_model(tmp_path / "moe", 100 * GIB, {**SHAPE, "moe_intermediate_size": 768, "quantization_config": FP8})
    service = {"model": "moe", "context": 8192, "sequences": 8, "tensor_parallel": [4]}
    with pytest.raises(ConfigError, match="fit no slice"):
        solve(read(tmp_path, [{"kind": "H200-141GB", "count": 4}], {"policy": service}))
    found = solve(read(tmp_path, [{"kind": "H200-141GB", "count": 4}], {"policy": {**service, "tensor_parallel": [2]}}))
    assert [each.gpus for each in found.servers] == [(0, 1)]


def test_a_small_model_shares_a_gpu_and_the_other_gpus_stay_free(tmp_path: Path) -> None:
    write_model(tmp_path / "small", 2 * GIB)
    services = {"draft": {"model": "small", "context": 1024, "sequences": 20, "servers": 4}}
    found = solve(read(tmp_path, [{"kind": "H100-80GB", "count": 4}], services))
    assert (found.gpus, found.served) == (1, {"draft": 20}) and len(found.servers) >= 4


def test_a_model_that_fits_nothing_says_what_would_fit(tmp_path: Path) -> None:
    write_model(tmp_path / "big", 200 * GIB)
    services = {"policy": {"model": "big", "context": 32768, "sequences": 8, "tensor_parallel": [1, 2]}}
    with pytest.raises(ConfigError, match=r"service policy.*largest of which has 79.2 GiB.*2 of \d+ GiB each"):
        solve(read(tmp_path, [{"kind": "H100-80GB", "count": 2}], services))


def test_services_without_names_are_refused_with_the_form(tmp_path: Path) -> None:
    file = "gpus: [{kind: H100-80GB, count: 8}]\nservices:\n- {model: m, context: 1, sequences: 1}\n"
    (tmp_path / "fleet.yaml").write_text(file)
    with pytest.raises(ConfigError, match=r"services: must map names to services.*policy: \{model"):
        Fleet.read(tmp_path / "fleet.yaml")


def test_gpus_that_are_given_twice_are_refused(tmp_path: Path) -> None:
    node = "gpus:\n- {node: NODE, kind: H100-80GB, count: 8}\n"
    (tmp_path / "fleet.yaml").write_text(node.replace("NODE", "a") + node.replace("NODE", "b"))
    with pytest.raises(ConfigError, match="key 'gpus' is given twice"):
        Fleet.read(tmp_path / "fleet.yaml")


@pytest.mark.parametrize(
    ("gpus", "service", "words"),
    [
        ({"kind": "H100"}, {}, r"gpus.0.count: Field required"),
        ({"kind": "H1000", "count": 1}, {}, r"unknown kind H1000: name one of A100-40GB"),
        ({"kind": "H100-80GB", "count": 1}, {"context": 0}, r"services.policy.context"),
        ({"kind": "H100-80GB", "count": 1}, {"replicas": 2}, r"services.policy.replicas: Extra inputs"),
        ({"kind": "H100-80GB", "count": 1}, {"model": "nowhere"}, r"nowhere: its config.json can't be read"),
        ({"kind": "mine", "memory_gib": math.inf, "count": 1}, {}, r"gpus.0.memory_gib: Input should be less"),
        ({"kind": "H100-80GB", "count": 1}, {"value": math.inf}, r"services.policy.value: Input should be less"),
        (
            {"kind": "H100-80GB", "count": 1},
            {"reserve_gib": 1e308},
            r"services.policy.reserve_gib: Input should be less",
        ),
        ({"kind": "H100-80GB", "count": 1}, {"tensor_parallel": [0]}, r"tensor_parallel.0: Input should be greater"),
    ],
)
def test_a_bad_file_is_one_clear_error(
    gpus: dict[str, Any], service: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "m", GIB)
    with pytest.raises(ConfigError, match=words):
        solve(read(tmp_path, [gpus], {"policy": {"model": "m", "context": 10, "sequences": 1, **service}}))


@pytest.mark.parametrize("wrong", [{"num_hidden_layers": "48"}, {"head_dim": -1}, {"num_attention_heads": "32"}])
def test_a_config_that_is_none_of_a_model_is_one_clear_error(tmp_path: Path, wrong: dict[str, Any]) -> None:
    write_model(tmp_path / "m", GIB, {**SHAPE, **wrong})
    with pytest.raises(ConfigError, match=r"m: its config.json is none of a model"):
        solve(read(tmp_path, ONE, {"policy": {"model": "m", "context": 10, "sequences": 1}}))


@pytest.mark.parametrize("size", ["0", "-5", "Infinity"])
def test_an_index_that_tells_no_size_is_one_clear_error(tmp_path: Path, size: str) -> None:
    index = write_model(tmp_path / "m", GIB) / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(str(GIB), size))
    with pytest.raises(ConfigError, match=r"m: model.safetensors.index.json has no metadata.total_size"):
        solve(read(tmp_path, ONE, {"policy": {"model": "m", "context": 10, "sequences": 1}}))
