"""The current slowdown of the machine."""

from aftserve.model.costs import SlowdownFactor


def test_first_estimates_never_speed_predictions_up() -> None:
    slowdown = SlowdownFactor()
    slowdown.observe(100.0, 1.0)
    assert slowdown.value == 1.0


def test_trusted_costs_forget_fast_runs_of_estimates() -> None:
    slowdown = SlowdownFactor()
    slowdown.observe(100.0, 1.0)
    slowdown.trust_costs()
    assert slowdown.value == 1.0
    slowdown.observe(100.0, 20.0)
    assert slowdown.value < 0.5


def test_trusted_costs_keep_slow_runs() -> None:
    slowdown = SlowdownFactor()
    slowdown.observe(10.0, 40.0)
    before = slowdown.value
    slowdown.trust_costs()
    assert slowdown.value == before > 2
