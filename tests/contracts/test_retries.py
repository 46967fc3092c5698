"""Pauses before attempts that follow a failed one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.retries import backoff_s


@given(st.integers(1, 12), st.floats(0.01, 10))
def test_a_pause_doubles_with_every_failure_and_varies_by_half(failures: int, first_s: float) -> None:
    mean = first_s * 2 ** (failures - 1)
    pauses = [backoff_s(failures, first_s) for _ in range(50)]
    assert all(mean / 2 <= pause <= mean * 1.5 for pause in pauses)
    assert len(set(pauses)) > 1


def test_a_pause_is_no_longer_than_its_bound() -> None:
    assert backoff_s(30, 1.0, longest_s=60.0) == pytest.approx(60.0)


def test_a_pause_stays_bounded_however_often_something_fails() -> None:
    """A router counts each request that a replica fails, for weeks."""
    assert backoff_s(10**6, 1.0, longest_s=60.0) == 60.0
