"""Supports survive their file, and tell whether a token was drawn from its support."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import SchemaError
from contracts.supports import SupportsWriter, decode_supports, encode_supports, supports_of

VOCABULARY = 40
MASKS = st.none() | st.sets(st.integers(0, VOCABULARY - 1), min_size=1).map(
    lambda members: np.isin(np.arange(VOCABULARY), list(members))
)


@settings(max_examples=100, deadline=None)
@given(st.lists(MASKS, max_size=12), st.lists(MASKS, max_size=6))
def test_supports_survive_their_file_and_a_continuation(
    first: list[npt.NDArray[np.bool_] | None], second: list[npt.NDArray[np.bool_] | None]
) -> None:
    writer = SupportsWriter()
    writer.extend(supports_of(first))
    writer.add(None, 2)
    writer.extend(decode_supports(encode_supports(supports_of(second))))
    wanted = [*first, None, None, *second]
    found = decode_supports(encode_supports(writer.supports()))
    whole = np.ones(VOCABULARY, np.bool_)
    expected = np.array([whole if mask is None else mask for mask in wanted])
    np.testing.assert_array_equal(found.masks(np.arange(len(wanted)), VOCABULARY), expected)
    for token in range(VOCABULARY):
        lost = np.flatnonzero(~expected[:, token])
        fault = found.fault(np.full(len(wanted), token), VOCABULARY)
        assert (fault is None) == (not len(lost))
        assert fault is None or int(fault.split()[5].rstrip(",")) in lost


def test_equal_sets_are_kept_once() -> None:
    few, many = np.zeros(50_000, np.bool_), np.ones(50_000, np.bool_)
    few[[3, 40_000]], many[7] = True, False
    found = supports_of([few, many, None] * 100)
    assert [len(found.sizes), len(found.ids)] == [2, 3]
    assert len(encode_supports(found)) < 2_000


def test_a_record_of_other_tokens_is_named() -> None:
    few = np.isin(np.arange(VOCABULARY), [1, 2])
    found = supports_of([few, None])
    assert found.fault(np.array([2, 39]), VOCABULARY) is None
    assert found.fault(np.array([2]), VOCABULARY) == "covers 2 of 1 tokens"
    assert found.fault(np.array([3, 39]), VOCABULARY) == "leaves out the token at 0, 3, which was drawn from it"
    assert found.fault(np.array([2, 1]), 2) == "names a token outside 0..1"


@pytest.mark.parametrize("cut", [0, 10, 130, 300])
def test_a_cut_record_is_refused(cut: int) -> None:
    data = encode_supports(supports_of([np.isin(np.arange(VOCABULARY), [1])]))
    with pytest.raises(SchemaError, match="record them again"):
        decode_supports(data[:cut])


@pytest.mark.parametrize(
    "arrays",
    [
        ([5], [1], [False], [0]),
        ([-2], [1], [False], [0]),
        ([0], [2], [False], [0]),
        ([0], [1], [], [0]),
        ([0], [-1], [False], []),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(arrays: tuple[list[int], ...]) -> None:
    out = io.BytesIO()
    for values, dtype in zip(arrays, (np.int32, np.int32, np.bool_, np.int32), strict=True):
        np.lib.format.write_array(out, np.array(values, dtype), version=(1, 0))
    with pytest.raises(SchemaError, match="sets that their record does not have"):
        decode_supports(out.getvalue())
