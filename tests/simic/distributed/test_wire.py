"""What travels between learner and actors: the same values in the same bits, and no path."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from esper.leyline.errors import UsageError
from esper.simic.distributed.cluster import check_address
from esper.simic.distributed.wire import as_arrays, as_tensors, element, size_of, stack
from esper.simic.gym.collect import collect
from esper.simic.training.actor_specs import PlacedActor
from scripted_gym import agent_for, scripted


@dataclass
class Inner:
    """Known only in the last steps."""

    accuracy: Tensor
    shapley: Tensor | None


@dataclass
class Outer:
    """A report of one step of three environments."""

    reward: Tensor
    scores: Inner | None
    never: Tensor | None
    name: str


def reports(steps: int) -> list[Outer]:
    draws = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(3, *shape, generator=draws)

    def report(t: int) -> Outer:
        left = steps - 1 - t
        inner = Inner(drawn(), drawn(2) if left == 0 else None)
        return Outer(drawn().double(), inner if left < 3 else None, None, "same")

    return [report(t) for t in range(steps)]


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_steps_that_are_stacked_come_apart_in_the_same_bits(steps: int) -> None:
    before = reports(steps)
    together = as_tensors(as_arrays(stack(before)))
    assert together.reward.shape == (3, steps)
    after = [element(together, t, steps) for t in range(steps)]
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.reward, other.reward)
        assert one.reward.dtype == other.reward.dtype
        assert (one.scores is None) == (other.scores is None)
        assert other.never is None
        assert other.name == "same"
        if one.scores is not None and other.scores is not None:
            assert torch.equal(one.scores.accuracy, other.scores.accuracy)
            assert (one.scores.shapley is None) == (other.scores.shapley is None)
    assert torch.equal(after[-1].scores.shapley, before[-1].scores.shapley)


def test_every_kind_of_tensor_survives_the_way_and_is_counted() -> None:
    value = {
        "a": (torch.tensor([True, False]), torch.tensor(3)),
        "b": [torch.full((2, 2), float("nan")), None, 7],
        "c": Inner(torch.zeros(0, 4), None),
    }
    arrays = as_arrays(value)
    assert size_of(arrays) == 2 * 1 + 8 + 4 * 4
    for array in (arrays["a"][0], arrays["b"][0]):
        assert isinstance(array, np.ndarray)
        array.flags.writeable = False  # as ray delivers them
    back = as_tensors(arrays)
    assert back["a"][0].tolist() == [True, False]
    assert back["a"][1].ndim == 0
    assert bool(back["b"][0].isnan().all())
    assert back["b"][1:] == [None, 7]
    assert back["c"].accuracy.shape == (0, 4)
    back["b"][0].zero_()
    assert bool(np.isnan(arrays["b"][0]).all()), "what was delivered has changed"


@pytest.mark.parametrize("cut", [1, 2, 4])
@pytest.mark.parametrize("memory", ["lstm", "none"])
def test_a_part_of_the_environments_acts_with_the_bits_of_all(cut: int, memory: str) -> None:
    """Products of fewer rows differ in the last bits; those of a placed actor do not."""
    agent = agent_for(scripted(7), memory=memory, lstm_hidden=32)
    whole = scripted(7)
    agent.begin(whole.identities, 0)
    expected = collect(whole, agent, 12, 1)
    for begin, end in ((0, cut), (cut, 7)):
        part = scripted(end - begin, first=begin)
        actor = PlacedActor(agent.policy, agent.moments, agent.seed, agent.device, begin, end, 7)
        actor.begin(part.identities, 0)
        found = collect(part, actor, 12, 1)
        rows = slice(begin, end)
        for name in ("actions", "log_prob", "values", "rewards", "terminated", "truncated"):
            assert torch.equal(getattr(found, name), getattr(expected, name)[:, rows]), name
        assert torch.equal(found.last_value, expected.last_value[rows])
        for mine, theirs in zip(actor.hidden, agent.hidden, strict=True):
            assert torch.equal(mine, theirs[:, rows])


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ray://somewhere:10001", "must be HOST:PORT"),
        ("somewhere", "must be HOST:PORT"),
        ("127.0.0.1:", "must be HOST:PORT"),
        ("127.0.0.1:99999", "nothing answers"),
        ("127.0.0.1:1", "nothing answers at 127.0.0.1:1"),
    ],
)
def test_an_address_at_which_nothing_listens_is_refused_at_once(address: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"ray_address: .*{says}"):
        check_address(address)
