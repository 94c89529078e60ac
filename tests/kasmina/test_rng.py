"""The counter-based generator: published vectors, independent streams and distributions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.kasmina import rng
from esper.kasmina.rng import Purpose, philox, random_bits, to_integers, uniform
from examples import examples

KNOWN_ANSWERS = {
    # counter, key and result of philox4x32-10 in kat_vectors of Random123
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    "digits of pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}

COORDINATES = {"seed": 11, "purpose": Purpose.MINIBATCH, "episode": 5, "step": 2}


def words(count: int = 8, streams: tuple[int, ...] = (3,), **changes: int) -> torch.Tensor:
    return random_bits(streams=torch.tensor(streams), count=count, **(COORDINATES | changes))


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS.values(), ids=KNOWN_ANSWERS)
def test_philox_matches_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
):
    found = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(word.item() for word in found) == answer


def test_purposes_are_those_with_which_runs_were_recorded():
    """Another number is another stream: a run that is resumed would not go on as it began."""
    names = "HOST_INIT MINIBATCH ACTION POLICY_SHUFFLE RANDOM_POLICY DRIFT TASK GYM_RESET NEWBORN"
    numbers = {name: number for number, name in enumerate(names.split(), 1)}
    numbers |= {"HELD_OUT": 10, "CUT_OFF": 11, "SEED_INIT": 1000}
    assert {purpose.name: int(purpose) for purpose in Purpose} == numbers


def test_random_bits_are_philox_of_the_documented_counter_and_key():
    """Key (seed, stream), counter (block, step, episode, purpose)."""
    expected = [
        word.item()
        for block in range(2)
        for word in philox(
            tuple(map(torch.tensor, (block, 2, 5, int(Purpose.MINIBATCH)))),
            tuple(map(torch.tensor, (11, 3))),
        )
    ]
    assert words(8)[0].tolist() == expected


@given(streams=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6), data=st.data())
@settings(max_examples=examples(30))
def test_stream_does_not_depend_on_other_streams(streams: list[int], data: st.DataObject):
    position = data.draw(st.integers(0, len(streams) - 1))
    together = words(9, tuple(streams))
    alone = words(9, (streams[position],))
    assert torch.equal(together[position], alone[0])


def test_longer_draw_starts_with_the_shorter_one():
    longer = words(50)
    for count in (1, 3, 4, 5, 49):
        assert torch.equal(words(count), longer[:, :count])


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 12},
        {"purpose": Purpose.ACTION},
        {"episode": 6},
        {"step": 3},
        {"streams": (4,)},
        # Adjacent coordinates must not be interchangeable.
        {"episode": 2, "step": 5},
        {"seed": 3, "streams": (11,)},
    ],
    ids=str,
)
def test_every_coordinate_changes_the_stream(change: dict):
    assert (words(40) == words(40, **change)).float().mean() < 0.1


def test_zero_streams_and_zero_numbers_are_valid():
    assert words(5, ()).shape == (0, 5)
    assert words(0).shape == (1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_fill_the_open_unit_interval(dtype: torch.dtype):
    drawn = uniform(1, torch.arange(20), Purpose.HOST_INIT, 0, 0, 10_000, dtype)
    assert drawn.dtype == dtype
    assert 0.0 < drawn.min() < 1e-3
    assert 1.0 - 1e-3 < drawn.max() < 1.0
    # 200,000 draws: five standard errors of mean, variance and neighbours' correlation.
    drawn = drawn.double()
    assert drawn.mean().item() == pytest.approx(0.5, abs=5 * (1 / 12 / 200_000) ** 0.5)
    assert drawn.var().item() == pytest.approx(1 / 12, abs=5 * (1 / 180 / 200_000) ** 0.5)
    centred = drawn - 0.5
    assert (centred[:, 1:] * centred[:, :-1]).mean().abs() < 5 / 12 / 200_000**0.5
    assert (centred[1:] * centred[:-1]).mean().abs() < 5 / 12 / 190_000**0.5


def test_uniform_numbers_are_equal_in_float32_and_float64():
    single, double = (
        uniform(1, torch.arange(3), Purpose.ACTION, 2, 7, 100, d)
        for d in (torch.float32, torch.float64)
    )
    assert torch.equal(single.double(), double)


def test_extreme_words_stay_within_interval_and_range(monkeypatch: pytest.MonkeyPatch):
    extreme = torch.tensor([[0, rng.MASK_32]])
    monkeypatch.setattr(rng, "random_bits", lambda *_: extreme)
    for dtype in (torch.float32, torch.float64):
        assert uniform(0, torch.zeros(1), 1, 0, 0, 2, dtype).tolist() == [[2**-24, 1 - 2**-24]]
    for high in (1, 2, 1000, 2**31 - 1):
        assert to_integers(extreme, high).tolist() == [[0, high - 1]]


@given(high=st.integers(1, 2**31 - 1), stream=st.integers(0, 2**32 - 1))
@settings(max_examples=examples(50))
def test_integers_lie_in_their_range(high: int, stream: int):
    drawn = to_integers(random_bits(1, torch.tensor([stream]), Purpose.MINIBATCH, 0, 0, 200), high)
    assert drawn.dtype == torch.long
    assert 0 <= drawn.min() <= drawn.max() < high


@pytest.mark.parametrize("high", [2, 10, 97])
def test_integers_are_roughly_uniform(high: int):
    count = 100_000
    bits = random_bits(1, torch.arange(10), Purpose.MINIBATCH, 0, 0, count // 10)
    drawn = to_integers(bits, high)
    found = torch.bincount(drawn.flatten(), minlength=high).double()
    expected = count / high
    chi_squared = ((found - expected) ** 2 / expected).sum().item()
    assert chi_squared < high - 1 + 5 * (2 * (high - 1)) ** 0.5
    assert len(found) == high


def test_step_bits_equal_the_words_of_each_step(monkeypatch):
    """For any block size and any order of steps."""
    streams = torch.tensor([3, 1 << 40, 7])
    monkeypatch.setattr(rng, "_MAX_WORDS", 4 * len(streams) * 10)
    bits = rng.StepBits(5, streams, Purpose.MINIBATCH, 2, 10)
    assert bits.block == 4
    for step in (0, 1, 5, 4, 11, 2):
        expected = random_bits(5, streams, Purpose.MINIBATCH, 2, step, 10)
        assert torch.equal(bits.at(step), expected), step
