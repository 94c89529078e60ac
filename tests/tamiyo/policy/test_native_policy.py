"""The native policy compared with torch in fp64 and fp32; threads; index checks."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from esper.leyline.actions import HEADS, Op
from esper.native import build
from esper.tamiyo.policy import native_network
from esper.tamiyo.policy.factored_lstm import Evaluation, FactoredLSTM, RecurrentState
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.policy.noise import action_noise
from support import needs_native
from synthetic import acted, canonical_action, changed, everything_legal, picked, random_observation

pytestmark = needs_native

SHAPES = [
    *((1, 1, 1, 16), (5, 3, 2, 16), (4, 8, 1, 24), (3, 19, 5, 20), (2, 9, 3, 130)),
    *((2, 19, 2, 272), (18, 16, 1, 264)),
]
"""Steps, environments, slots and LSTM width: whole registers and blocks, and others; the last two
have rows longer than a page, and the very last more of them than are summed at a time."""


def moved_policy(width: int, dtype: torch.dtype, seed: int = 0) -> FactoredLSTM:
    """A policy with changed weights, because the initial heads are nearly uniform."""
    torch.manual_seed(seed)
    policy = FactoredLSTM(lstm_hidden=width)
    with torch.no_grad():
        for parameter in policy.parameters():
            spread = 0.3 if parameter.ndim == 1 else 1.0 / parameter.shape[-1] ** 0.5
            parameter.add_(spread * torch.randn_like(parameter))
    return policy.to(dtype)


def scene(
    shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int = 0
) -> tuple[Observation, Tensor, RecurrentState]:
    """Observations ``[T, N]``, legal actions and a hidden state."""
    steps, environments, slots, width = shape
    seen = random_observation((steps, environments), slots, seed)
    floats = {k: v.to(dtype) for k, v in seen.tensors().items() if v.is_floating_point()}
    seen = changed(seen, **floats)
    torch.manual_seed(seed)
    hidden = tuple(torch.randn(1, environments, width, dtype=dtype) for _ in range(2))
    chooser = moved_policy(width, dtype, seed=1)
    chooser.native = False
    noise = [action_noise(seed, torch.arange(environments), 0, t, 32) for t in range(steps)]
    actions = [chooser.act(picked(seen, t), hidden, noise[t])[0] for t in range(steps)]
    return seen, torch.stack(actions), hidden


def graded(policy: FactoredLSTM, *given) -> tuple[Evaluation, dict[str, Tensor]]:
    """An evaluation, and the gradients of a random function of its outputs."""
    policy.zero_grad()
    said = policy.evaluate_actions(*given)
    torch.manual_seed(7)
    parts = [said.log_prob, said.head_entropy, said.value]
    sum((torch.randn_like(part) * part).sum() for part in parts).backward()
    return said, {name: p.grad.clone() for name, p in policy.named_parameters()}


def both_ways(policy: FactoredLSTM, *given):
    """The results of torch and of the library."""
    policy.native = False
    by_torch = graded(policy, *given)
    policy.native = True
    return by_torch, graded(policy, *given)


def assert_close(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    """Assert a difference of at most ``tolerance`` times the norm, or times 1 if that is larger."""
    error = (found - expected).norm() / expected.norm().clamp(min=1.0)
    assert error <= tolerance, (name, error)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
def test_outputs_and_gradients_match_torch(shape, dtype, tolerance) -> None:
    policy = moved_policy(shape[-1], dtype)
    (said, gradients), (native, natives) = both_ways(policy, *scene(shape, dtype))
    for part in fields(Evaluation):
        expected, found = getattr(said, part.name), getattr(native, part.name)
        assert found.dtype == expected.dtype, part.name
        assert_close(found.double(), expected.double(), tolerance, part.name)
    for name, expected in gradients.items():
        assert_close(natives[name], expected, tolerance, name)
    # With this many decisions every head is relevant at least once.
    if shape[0] * shape[1] > 20 and shape[2] > 1:
        assert all(bool((gradient != 0).any()) for gradient in natives.values())


@pytest.mark.parametrize("greedy", [False, True])
def test_actions_match_torch(greedy: bool) -> None:
    shape = (1, 300, 3, 16)
    policy = moved_policy(16, torch.float64)
    seen, _, hidden = scene(shape, torch.float64)
    noise = None if greedy else action_noise(3, torch.arange(300), 1, 2, 13)
    given = picked(seen, 0), hidden, noise
    native = policy.act(*given)
    policy.native = False
    expected = policy.act(*given)
    assert torch.equal(native[0], expected[0])
    assert native[0].dtype == torch.int64
    for found, wanted in zip(
        (*native[1:3], *native[3]), (*expected[1:3], *expected[3]), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-9)
    assert set(native[0][:, 0].tolist()) == {int(op) for op in Op} or greedy


def test_equal_slots_share_the_gradient_of_their_maximum() -> None:
    shape = (2, 3, 4, 16)
    seen, actions, hidden = scene(shape, torch.float64)
    alike = seen.slots[:, :, :1].expand_as(seen.slots).contiguous()
    kinds = seen.blueprints[:, :, :1].expand_as(seen.blueprints).contiguous()
    seen = changed(seen, slots=alike, blueprints=kinds)
    (_, gradients), (_, natives) = both_ways(moved_policy(16, torch.float64), seen, actions, hidden)
    for name, expected in gradients.items():
        assert_close(natives[name], expected, 1e-9, name)


def test_padding_slots_have_no_effect() -> None:
    seen, actions, hidden = scene((3, 10, 3, 16), torch.float64)
    seen = everything_legal(seen)
    kinds, slots = seen.masks.kinds.clone(), seen.masks.slots.clone()
    kinds[..., 2, :] = False
    slots[..., 1:, 2] = False
    actions = canonical_action(op=Op.WAIT).expand_as(actions)
    seen = changed(seen, mask_kinds=kinds, mask_slots=slots)
    policy = moved_policy(16, torch.float64)
    (said, gradients), (native, natives) = both_ways(policy, seen, actions, hidden)
    assert_close(native.log_prob, said.log_prob, 1e-9, "log_prob")
    for name, expected in gradients.items():
        assert_close(natives[name], expected, 1e-9, name)


def test_results_are_bitwise_independent_of_the_number_of_threads() -> None:
    policy = moved_policy(40, torch.float32)
    given = scene((20, 68, 2, 40), torch.float32)  # enough rows for eight threads
    found = []
    for policy.threads in (1, 2, 3, 8):
        said, gradients = graded(policy, *given)
        found.append((said.log_prob, said.head_entropy, said.value, *gradients.values()))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_results_are_bitwise_independent_of_other_environments() -> None:
    seen, actions, hidden = scene((4, 20, 2, 16), torch.float32)
    policy = moved_policy(16, torch.float32)
    together = policy.evaluate_actions(seen, actions, hidden)
    some = torch.tensor([3, 11, 19])
    tensors = {k: v[:, some] for k, v in seen.tensors().items()}
    tensors["host"] = tensors["host"].clone()
    tensors["host"][:, 1] = float("nan")
    mine = (hidden[0][:, some], hidden[1][:, some])
    alone = policy.evaluate_actions(Observation.from_tensors(tensors), actions[:, some], mine)
    for i in (0, 2):
        assert torch.equal(alone.log_prob[:, i], together.log_prob[:, some[i]])
        assert torch.equal(alone.value[:, i], together.value[:, some[i]])
    assert bool(alone.value[:, 1].isnan().all())


def test_acting_step_by_step_is_bitwise_equal_to_evaluating() -> None:
    """So that the importance ratio of the first minibatch is exactly 1."""
    seen, _, _ = scene((9, 21, 3, 24), torch.float32)
    policy = moved_policy(24, torch.float32)
    actions, log_prob, value = acted(policy, seen, 13, seed=5)
    said = policy.evaluate_actions(seen, actions, policy.initial_hidden(21))
    assert torch.equal(said.log_prob, log_prob)
    assert torch.equal(said.value, value)


def test_frozen_weights_do_not_change_the_results() -> None:
    """Steps with two numbers of environments, and afterwards with other weights."""
    policy, width = moved_policy(24, torch.float32), 24
    scenes = [scene((2, count, 3, width), torch.float32, seed=count) for count in (21, 21, 5)]

    def steps() -> list[Tensor]:
        said: list[Tensor] = []
        for number, (seen, _, hidden) in enumerate(scenes):
            for t in range(2):
                noise = action_noise(5, torch.arange(seen.host.shape[1]), number, t, 13)
                *parts, hidden = policy.act(picked(seen, t), hidden, noise)
                said += [*parts, *hidden]
        return said

    with policy.frozen_weights():
        held = steps()
    assert all(torch.equal(a, b) for a, b in zip(held, steps(), strict=True))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    changed_weights = steps()
    with policy.frozen_weights():
        again = steps()
    assert all(torch.equal(a, b) for a, b in zip(again, changed_weights, strict=True))
    assert not torch.equal(again[1], held[1])


def test_an_index_out_of_range_is_an_error() -> None:
    seen, actions, hidden = scene((2, 3, 2, 16), torch.float32)
    policy = moved_policy(16, torch.float32)
    for head in range(len(HEADS)):
        for bad in (-1, 1000):
            wrong = actions.clone()
            wrong[1, 2, head] = bad
            with pytest.raises(RuntimeError, match="native"):
                policy.evaluate_actions(seen, wrong, hidden)
    blueprints = seen.blueprints.clone()
    blueprints[0, 0, 0] = 1000
    with pytest.raises(RuntimeError, match="native"):
        policy.evaluate_actions(changed(seen, blueprints=blueprints), actions, hidden)


def test_backward_works_once_and_nothing_is_kept_without_gradients() -> None:
    policy = moved_policy(16, torch.float32)
    given = scene((2, 3, 2, 16), torch.float32)
    said = policy.evaluate_actions(*given)
    said.value.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        said.value.sum().backward()
    with torch.no_grad():
        assert not policy.evaluate_actions(*given).value.requires_grad


class Halved(FactoredLSTM):
    """Computes a different function of the same parameters."""

    def _value(self, memory: Tensor, observation: Observation) -> Tensor:
        return 0.5 * super()._value(memory, observation)


def test_torch_computes_what_the_library_does_not_support(monkeypatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("the library was asked")

    given = scene((2, 3, 2, 16), torch.float32)
    monkeypatch.setattr(native_network, "library_for", refused)
    policy = moved_policy(16, torch.float32)
    with pytest.raises(AssertionError):
        policy.evaluate_actions(*given)
    expected = policy.state_dict()
    other = Halved(16)
    other.load_state_dict(expected)
    other.evaluate_actions(*given)
    policy.amp_dtype = torch.bfloat16
    policy.evaluate_actions(*given)
    policy.amp_dtype, policy.native = None, False
    policy.evaluate_actions(*given)
    policy.native = True
    seen, actions, hidden = given
    seen = changed(seen, host=seen.host.clone().requires_grad_())
    policy.evaluate_actions(seen, actions, hidden).value.sum().backward()
    assert seen.host.grad is not None


FALLBACK = """
import sys
sys.path.insert(0, {tests!r})
import torch
from synthetic import random_observation
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
for _ in range(2):
    policy = FactoredLSTM(16)
    print(policy.act(random_observation((4,), 2, 0), policy.initial_hidden(4), None)[0].shape[0])
"""


def test_without_a_compiler_torch_computes_and_logs_one_line(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-c", FALLBACK.format(tests=tests)],
        env=os.environ | {"CXX": "no-such-compiler", build.CACHE_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["4", "4"]
    (line,) = run.stderr.splitlines()
    assert line.startswith("native backend: there is no C++ compiler")
    assert line.endswith("; using torch")


def test_every_slot_is_sampled_if_everything_is_legal() -> None:
    seen = everything_legal(random_observation((2_000,), 3, 5))
    policy = moved_policy(16, torch.float32)
    noise = action_noise(1, torch.arange(2_000), 0, 0, 13)
    actions = policy.act(seen, policy.initial_hidden(2_000), noise)[0]
    assert set(actions[:, 1].tolist()) == {0, 1, 2}
