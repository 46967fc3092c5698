"""Parts of parameters that ranks hold: each element belongs to one rank."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contracts.architectures import parameter_shapes
from trainer.backends.choose import _dealt
from trainer.backends.deepspeed import _layout_1, _layout_3
from trainer.backends.sharded import ranges_by_rank, rows_by_rank
from trainer.backends.shards import owners_of, parts_of, shard_of
from trainer.model_config import ModelConfig
from trainer.ranks import Ranks

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
COUNTS = st.integers(1, 5)


def covers(ranges: list[tuple[int, int]], size: int) -> bool:
    return [index for start, end in ranges for index in range(start, end)] == list(range(size))


@given(shape=SHAPES, count=COUNTS)
def test_rows_are_cut_as_torch_cuts_them(shape: tuple[int, ...], count: int) -> None:
    ranges = rows_by_rank(shape, count)
    assert covers(ranges, math.prod(shape))
    chunks = [chunk.numel() for chunk in torch.zeros(shape).chunk(count)]
    assert [end - start for start, end in ranges] == chunks + [0] * (count - len(chunks))


@given(experts=st.integers(1, 4), groups=COUNTS, parts=COUNTS)
def test_ranks_hold_their_part_of_the_experts(experts: int, groups: int, parts: int) -> None:
    stack = torch.arange(experts * parts * 3).view(-1, 3)
    ranges = ranges_by_rank((experts * parts, 3), groups * parts, parts)
    for rank, (start, end) in enumerate(ranges):
        own = stack.chunk(parts)[rank % parts].chunk(groups)
        wanted = own[rank // parts].flatten().tolist() if rank // parts < len(own) else []
        assert stack.flatten()[start:end].tolist() == wanted


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), count=COUNTS, gap=st.integers(0, 3))
def test_flat_partitions_hold_every_element_once(sizes: list[int], count: int, gap: int) -> None:
    names = {f"p{number}": size for number, size in enumerate(sizes)}
    starts = list(itertools.accumulate((size + gap for size in sizes[:-1]), initial=0))
    partition = -(-(starts[-1] + sizes[-1]) // count)
    ranges, offsets = _layout_1(names, starts, partition, count)
    flat = torch.full((partition * count,), -1)
    for (name, size), start in zip(names.items(), starts, strict=True):
        flat[start : start + size] = torch.arange(size)
        assert covers(ranges[name], size)
    for name, rank in itertools.product(names, range(count)):
        start, end = ranges[name][rank]
        at = rank * partition + offsets[name][rank]
        assert flat[at : at + end - start].tolist() == list(range(start, end))


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), count=COUNTS)
def test_partitions_of_zero_3_hold_every_element_once(sizes: list[int], count: int) -> None:
    names = {f"p{number}": size for number, size in enumerate(sizes)}
    ranges, offsets = _layout_3(names, count)
    assert all(covers(ranges[name], size) for name, size in names.items())
    for rank in range(count):
        ends = [0, *(offsets[name][rank] + ranges[name][rank][1] - ranges[name][rank][0] for name in names)]
        assert all(end <= offsets[name][rank] for name, end in zip(names, ends, strict=False))


def test_state_is_cut_by_the_parameter_in_its_name() -> None:
    shards = [shard_of(name, (4, 2), [(0, 4), (4, 8)], torch.zeros(4)) for name in ("a.weight", "b.a.weight")]
    owner = owners_of(shards)
    names = ("adamw.exp_avg.b.a.weight", "average.a.weight", "adamw.step")
    assert [found and found.name for found in map(owner, names)] == ["b.a.weight", "a.weight", None]
    parts = parts_of({"average.a.weight": torch.arange(8.0), "adamw.step": torch.tensor(3.0)}, shards, 1)
    assert parts["average.a.weight"].tolist() == [4, 5, 6, 7] and float(parts["adamw.step"]) == 3


@given(sizes=st.lists(st.integers(1, 30), max_size=30), count=COUNTS)
def test_no_rank_is_dealt_more_than_its_share_and_the_largest_item(sizes: list[int], count: int) -> None:
    owners = Ranks(0, count).deal(sizes)
    assert owners == Ranks(count - 1, count).deal(sizes)
    for rank in range(count):
        held = sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        assert held <= sum(sizes) / count + max(sizes, default=0)


@pytest.mark.parametrize("count", [8, 24])
def test_the_tensors_of_a_mixture_of_experts_are_dealt_evenly(count: int) -> None:
    wide: dict[str, Any] = {
        "hidden_size": 2048,
        "layers": 48,
        "experts": 128,
        "expert_width": 768,
        "experts_per_token": 8,
    }
    wide |= {"experts_per_token": 8, "heads": 32, "kv_heads": 4, "head_dim": 128}
    model = ModelConfig(**wide).hf_config(151_936, 0)
    shapes = parameter_shapes(model)
    dealt = [_dealt(model, Ranks(rank, count)) for rank in range(count)]
    assert sorted(name for names in dealt for name in names) == sorted(shapes)
    held = [sum(math.prod(shapes[name]) for name in names) for names in dealt]
    assert max(held) < 1.3 * sum(held) / count
