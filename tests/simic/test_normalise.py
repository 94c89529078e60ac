"""Running moments compared with numpy's moments over all data."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper.simic.normalise import RunningMoments

CPU = torch.device("cpu")


def fed(*parts: Tensor, shape: tuple[int, ...] = (3,)) -> RunningMoments:
    moments = RunningMoments(shape, CPU)
    for part in parts:
        moments.update(part)
    return moments


def data(seed: int, rows: int, offset: float = 0.0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return offset + scale * torch.randn(rows, 3, generator=generator, dtype=torch.float64)


@given(
    st.integers(0, 2**31),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.sampled_from([0.0, -3.0, 1e6]),
    st.sampled_from([1.0, 50.0]),
)
def test_moments_do_not_depend_on_how_data_are_batched(seed, parts, offset, scale) -> None:
    everything = data(seed, sum(parts), offset, scale)
    moments = fed(*everything.split(parts))
    state = moments.state()
    assert state["count"].item() == len(everything)
    np.testing.assert_allclose(
        moments.mean.numpy(), everything.numpy().mean(0), rtol=1e-12, atol=1e-9
    )
    variance = (state["squares"] / state["count"]).numpy()
    np.testing.assert_allclose(variance, everything.numpy().var(0), rtol=1e-6, atol=1e-9)
    deviation = np.sqrt(everything.numpy().var(0) + 1e-4)
    np.testing.assert_allclose(moments.deviation.numpy(), deviation, rtol=1e-6)


def test_leading_axes_are_rows() -> None:
    rows = data(1, 60)
    torch.testing.assert_close(fed(rows.view(5, 12, 3)).mean, rows.mean(0))
    scalars = fed(rows.view(5, 36), shape=())
    torch.testing.assert_close(scalars.mean, rows.mean())
    assert scalars.count.item() == 180


def test_normalised_data_have_mean_0_and_deviation_1() -> None:
    rows = data(2, 500, offset=7.0, scale=4.0)
    seen = fed(rows).normalise(rows)
    assert seen.dtype == torch.float32
    np.testing.assert_allclose(seen.numpy().mean(0), 0.0, atol=1e-5)
    np.testing.assert_allclose(seen.numpy().std(0), 1.0, atol=1e-4)


def test_before_the_first_update_normalising_changes_nothing() -> None:
    moments = fed()
    rows = data(3, 50).float()
    assert torch.equal(moments.normalise(rows), rows)
    assert torch.equal(moments.scale(rows), rows)
    assert torch.equal(moments.restore(rows), rows)


def test_normalise_clips_and_scale_does_not() -> None:
    moments = fed(data(4, 100))
    outlier = torch.tensor([[1e6, -1e6, 0.0]])
    assert moments.normalise(outlier)[0, :2].tolist() == [10.0, -10.0]
    assert bool((moments.scale(outlier)[0, :2].abs() > 1e5).all())


def test_restoring_undoes_scaling() -> None:
    moments = fed(data(5, 100, offset=20.0, scale=3.0))
    rows = data(6, 50, offset=10.0, scale=30.0)
    torch.testing.assert_close(moments.restore(moments.scale(rows)), rows.float())


def test_a_constant_column_stays_finite() -> None:
    rows = torch.full((10, 3), 4.0)
    moments = fed(rows)
    assert torch.equal(moments.normalise(rows), torch.zeros(10, 3))
    assert bool(moments.normalise(rows + 1e-3).isfinite().all())


def test_rows_that_are_not_finite_are_ignored() -> None:
    rows = data(14, 40, offset=3.0)
    spoilt = torch.cat([rows[:20], data(15, 4), rows[20:]])
    spoilt[20, 0], spoilt[21, 1], spoilt[22, 2], spoilt[23] = np.nan, np.inf, -np.inf, np.nan
    moments, expected = fed(spoilt.view(4, 11, 3)), fed(rows)
    for name, value in expected.state().items():
        torch.testing.assert_close(moments.state()[name], value)
    nothing = fed(spoilt[20:24])
    assert torch.equal(nothing.normalise(rows), rows.float())
    nothing.update(rows)
    assert torch.equal(nothing.mean, expected.mean)


def test_normalising_keeps_numbers_that_are_not_finite() -> None:
    nonsense = torch.tensor([[np.nan, np.inf, -np.inf]])
    for moments in (fed(), fed(data(16, 30))):
        seen = moments.normalise(nonsense)[0]
        assert seen[0].isnan()
        assert seen[1:].tolist() == [np.inf, -np.inf]


def test_normalising_does_not_change_the_moments() -> None:
    moments = fed(data(7, 30))
    before = {name: value.clone() for name, value in moments.state().items()}
    moments.normalise(data(8, 30)), moments.scale(data(8, 30)), moments.restore(data(8, 30))
    assert all(torch.equal(before[name], value) for name, value in moments.state().items())


def test_restored_moments_continue_exactly() -> None:
    moments = fed(data(9, 30, offset=5.0))
    copy = RunningMoments((3,), CPU)
    saved = {name: value.clone() for name, value in moments.state().items()}
    copy.load(saved)
    for further in (data(10, 7), data(11, 50)):
        moments.update(further)
        copy.update(further)
    for name, value in moments.state().items():
        assert torch.equal(copy.state()[name], value), name
    assert torch.equal(copy.normalise(further), moments.normalise(further))


def test_a_saved_state_is_not_changed_by_later_updates() -> None:
    moments = fed(data(12, 30))
    state = moments.state()
    kept = {name: value.clone() for name, value in state.items()}
    moments.update(data(13, 30))
    assert all(torch.equal(state[name], kept[name]) for name in kept)


def test_a_state_of_other_columns_is_an_error() -> None:
    with pytest.raises(ValueError, match="moments of shape"):
        fed().load(RunningMoments((4,), CPU).state())


def test_rows_of_other_columns_are_an_error() -> None:
    """[4, 6] must not be taken for 8 rows of 3."""
    with pytest.raises((ValueError, RuntimeError, AssertionError)):
        fed().update(torch.zeros(4, 6))
