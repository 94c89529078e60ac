"""How a run ended, against means written out by hand."""

import pytest

from esper.karn.final_figures import final_figures
from esper.leyline.events import GymEpisodes
from run_directories import outcome, started, write_run


def test_growth_is_averaged_over_the_last_tenth_of_the_rounds(tmp_path) -> None:
    # Gain in round n is n points, 10 (n - 1) on validation; returns are 0 to 3.
    run = write_run(tmp_path / "run", [started(11), *(outcome(n) for n in range(1, 12))])
    found = final_figures(run)
    assert found["gain"] == pytest.approx((10 + 11) / 2)
    assert found["validation_gain"] == pytest.approx((90 + 100) / 2)
    assert found["episode_return"] == pytest.approx(1.5)
    assert found["added_parameters"] == pytest.approx((40 + 44) / 2)


def test_a_repeated_round_counts_once_as_it_was_repeated(tmp_path) -> None:
    first, again = outcome(2, episode_return=[9.0] * 4), outcome(2, episode_return=[5.0] * 4)
    run = write_run(tmp_path / "run", [started(2), outcome(1), first, outcome(2), again])
    assert final_figures(run)["episode_return"] == 5.0


def test_what_is_not_finite_or_not_recorded_is_left_out(tmp_path) -> None:
    old = outcome(1, episode_return=["NaN", 1.0, 2.0, "Infinity"], test_utility=[])
    found = final_figures(write_run(tmp_path / "run", [started(1), old]))
    assert found["episode_return"] == pytest.approx(1.5)
    assert "gain" not in found
    assert final_figures(tmp_path) == {}


def test_a_gymnasium_task_has_returns_and_lengths(tmp_path) -> None:
    ended = GymEpisodes(
        time=0.0, round=1, environment=[0, 1], episode_return=[10.0, 30.0], length=[10, 30],
        terminated=[True, True],
    )  # fmt: skip
    run = write_run(tmp_path / "run", [started(1, gym="CartPole-v1"), ended])
    assert final_figures(run) == {"episode_return": 20.0, "length": 20.0}
