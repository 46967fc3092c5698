"""The printed power of a gate against decisions taken one by one."""

import numpy as np
import pytest

from curation.power import ASSUMED, Gate, TaskRates, measured_rates, moved, refusal_rate, sample, simulate_iterations
from curation.statistics import non_inferior, paired_difference

GATE = Gate(tasks=128, samples=8, margin=0.05, confidence=0.9)
RATES = TaskRates(0.8, 0.28, "simulated")


@pytest.mark.parametrize("loss", [0.0, 0.03, 0.05])
def test_printed_refusals_equal_those_of_whole_decisions_to_two_points(loss: float) -> None:
    generator = np.random.default_rng(11)
    gate, refused, trials = Gate(64, 4, 0.05, 0.9), 0, 1500
    for _ in range(trials):
        tasks = RATES.draw(generator, (gate.tasks,))
        counts = [generator.binomial(gate.samples, rates) for rates in (moved(tasks, RATES.mean, -loss), tasks)]
        candidate, parent = (
            {str(task): [1] * int(wins) + [0] * int(gate.samples - wins) for task, wins in enumerate(each)}
            for each in counts
        )
        refused += not non_inferior(paired_difference(candidate, parent, gate.confidence), gate.margin).holds
    # 2 points and the two standard errors of this test's own 1500 decisions
    slack = 0.02 + 2 * (0.25 / trials) ** 0.5 if 0.05 < refused / trials < 0.9 else 0.02
    assert refused / trials == pytest.approx(refusal_rate(gate, RATES, -loss), abs=slack)


def test_a_loss_of_the_margin_is_refused_as_often_as_the_confidence_says() -> None:
    assert refusal_rate(GATE, RATES, -0.05) == pytest.approx(0.95, abs=0.015)


def test_power_grows_with_samples_and_with_the_loss() -> None:
    few = Gate(128, 2, 0.05, 0.9)
    assert refusal_rate(GATE, RATES, 0.0) < 0.05 < refusal_rate(few, RATES, 0.0)
    assert refusal_rate(GATE, RATES, 0.0) < refusal_rate(GATE, RATES, -0.03) < refusal_rate(GATE, RATES, -0.05)


def test_small_losses_add_up_without_the_floor_and_do_not_with_it() -> None:
    parent_only = simulate_iterations(GATE, RATES, [-0.03] * 20, floor=False, sequences=500)
    with_floor = simulate_iterations(GATE, RATES, [-0.03] * 20, sequences=500)
    assert parent_only.beyond > 0.5
    assert with_floor.beyond < 0.2
    assert with_floor.loss < 0.045


def test_the_floor_remembers_a_peak_after_it_is_lost() -> None:
    rise_and_fall = [0.02] * 5 + [-0.03] * 15
    parent_only = simulate_iterations(GATE, RATES, rise_and_fall, floor=False, sequences=500)
    assert simulate_iterations(GATE, RATES, rise_and_fall, sequences=500).loss < 0.7 * parent_only.loss


@pytest.mark.parametrize("difference", [-0.2, -0.03, 0.0, 0.03, 0.15])
def test_moved_rates_have_the_wanted_mean_and_stay_rates(difference: float) -> None:
    tasks = RATES.draw(np.random.default_rng(0), (200_000,))
    found = moved(tasks, RATES.mean, difference)
    assert float(found.mean()) == pytest.approx(0.8 + difference, abs=3e-3)
    assert float(found.min()) >= 0 and float(found.max()) <= 1


def test_measured_rates_take_the_noise_of_sampling_off() -> None:
    generator = np.random.default_rng(3)
    tasks = RATES.draw(generator, (5000,))
    outcomes = {str(task): list(generator.binomial(1, rate, 4)) for task, rate in enumerate(tasks)}
    found = measured_rates(outcomes, "test")
    assert found is not None
    assert (found.mean, found.deviation) == (pytest.approx(0.8, abs=0.015), pytest.approx(0.28, abs=0.015))
    assert measured_rates({"a": [1], "b": [0]}, "one sample each") is None


def test_assumed_rates_are_even() -> None:
    drawn = ASSUMED.draw(np.random.default_rng(0), (100_000,))
    assert [float(np.quantile(drawn, q)) for q in (0.1, 0.5, 0.9)] == pytest.approx([0.1, 0.5, 0.9], abs=0.01)
    assert set(np.unique(sample(np.random.default_rng(0), drawn[:100], 2))) == {0.0, 0.5, 1.0}
