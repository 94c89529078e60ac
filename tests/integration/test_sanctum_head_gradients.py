"""Ticket B11-PT-01: mixed precision must not cut the action heads off from their gradients.

On a CPU the fault does not occur, so the tests check its mechanism: which tensors are float32
inside an enclosing autocast region, in rollout and update. The tests named in the ticket run on a
CUDA device (``-m gpu``) and on the virtual one.
"""

import math

import pytest
import torch
from torch import Tensor

from esper.leyline.actions import HEADS
from esper.leyline.config import LearnerConfig, TrainConfig, unflatten
from esper.simic.growth.agent import growth_agent
from esper.simic.growth.collect import collect
from esper.simic.ppo import PPOAgent
from esper.simic.training.setup import arithmetic, build_agent, build_environment, resolve_device
from esper.tamiyo.policy.action_masks import MASKED_LOGIT, MaskedCategorical
from esper.tamiyo.policy.interface import Policy
from support import needs_bfloat16
from synthetic import CPU, picked, synthetic_rollout

SMALL = LearnerConfig(lstm_hidden=16, minibatches=2, ppo_epochs=2)
HALF = [torch.bfloat16, torch.float16]


def agent_with(amp_dtype: torch.dtype | None = None) -> PPOAgent:
    return growth_agent(SMALL, 0, CPU, amp_dtype)


def enclosing(dtype: torch.dtype) -> torch.autocast:
    """Return the autocast region in which the ticket's training loop ran its update."""
    return torch.autocast("cpu", dtype=dtype)


class ObservationT:
    """Records the dtypes in a policy's parts while it acts or learns."""

    def __init__(self, policy: Policy, monkeypatch):
        self.dtypes: dict[str, set[torch.dtype]] = {}
        for name, module in policy.named_modules():
            if isinstance(module, torch.nn.Linear | torch.nn.LSTM):
                module.register_forward_hook(self._hook(name))
        log_softmax = torch.Tensor.log_softmax

        def spy(x: Tensor, dim: int) -> Tensor:
            self._note("logits", x)
            result = log_softmax(x, dim)
            self._note("log_probs", result)
            return result

        monkeypatch.setattr(torch.Tensor, "log_softmax", spy)

    def _hook(self, name: str):
        def hook(module, inputs, output) -> None:
            self._note(name, output[0] if isinstance(output, tuple) else output)

        return hook

    def _note(self, name: str, x: Tensor) -> None:
        self.dtypes.setdefault(name, set()).add(x.dtype)


def heads_of(seen: ObservationT) -> dict[str, set[torch.dtype]]:
    trunk = ("lstm", "encoder.", "slot_encoder.")
    return {name: d for name, d in seen.dtypes.items() if not name.startswith(trunk)}


@pytest.mark.parametrize("dtype", HALF)
def test_the_policy_computes_in_float32_under_an_enclosing_autocast(dtype, monkeypatch) -> None:
    agent = agent_with()
    with enclosing(dtype):
        rollout = synthetic_rollout(agent, 4, 8, 2, seed=1)
        seen = ObservationT(agent.policy, monkeypatch)
        agent.update(rollout)
    assert {"lstm", "op_head.out", "slot_head.out", "value_head.out", "logits"} <= set(seen.dtypes)
    assert set().union(*seen.dtypes.values()) == {torch.float32}


@pytest.mark.parametrize("dtype", HALF)
def test_rollout_and_its_evaluation_are_float32_too(dtype, monkeypatch) -> None:
    agent = agent_with()
    seen = ObservationT(agent.policy, monkeypatch)
    with enclosing(dtype):
        rollout = synthetic_rollout(agent, 4, 8, 2, seed=1)
        hidden = agent.policy.initial_hidden(8)
        agent.policy.evaluate_actions(rollout.observation, rollout.actions, hidden)
    assert set().union(*seen.dtypes.values()) == {torch.float32}


@pytest.mark.parametrize("dtype", HALF)
def test_an_enclosing_autocast_changes_no_bit_of_an_update(dtype) -> None:
    plain, enclosed = agent_with(), agent_with()
    for agent, region in ((plain, None), (enclosed, enclosing(dtype))):
        if region is None:
            agent.update(synthetic_rollout(agent, 4, 8, 2, seed=1))
        else:
            with region:
                agent.update(synthetic_rollout(agent, 4, 8, 2, seed=1))
    for mine, theirs in zip(plain.policy.parameters(), enclosed.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@needs_bfloat16
def test_optional_half_precision_applies_only_to_the_trunk(monkeypatch) -> None:
    agent = agent_with(torch.bfloat16)
    seen = ObservationT(agent.policy, monkeypatch)
    agent.update(synthetic_rollout(agent, 4, 8, 2, seed=1))
    assert seen.dtypes["lstm"] == {torch.bfloat16}
    assert seen.dtypes["slot_encoder.2"] == {torch.bfloat16}
    assert set().union(*heads_of(seen).values()) == {torch.float32}
    assert all(p.dtype == torch.float32 for p in agent.policy.parameters())


def random_logits(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 4.0 * torch.randn(shape, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.6
    mask[..., 0] = True
    return logits, mask


@pytest.mark.parametrize("dtype", HALF)
def test_a_masked_categorical_in_half_precision_agrees_with_float64(dtype) -> None:
    logits, mask = random_logits((200, 13), 3)
    half = logits.to(dtype).requires_grad_()
    exact = half.detach().double().requires_grad_()
    mine, reference = MaskedCategorical(half, mask), MaskedCategorical(exact, mask)
    chosen = reference.mode
    for a, b in (
        (mine.log_prob(chosen), reference.log_prob(chosen)),
        (mine.entropy(), reference.entropy()),
    ):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=0.0, atol=1e-5)
    mine.log_prob(chosen).sum().backward()
    reference.log_prob(chosen).sum().backward()
    assert half.grad is not None
    assert bool(half.grad.isfinite().all())
    torch.testing.assert_close(half.grad.double(), exact.grad, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", HALF)
def test_masks_are_deterministic_in_half_precision(dtype) -> None:
    """Not even the largest logit gives an illegal option a chance to be drawn."""
    logits, mask = random_logits((500, 7), 5)
    logits = torch.where(mask, logits, 6e4).to(dtype)
    distribution = MaskedCategorical(logits, mask)
    assert bool((distribution.log_probs[~mask] <= MASKED_LOGIT / 2).all())
    uniform = torch.rand(500, 7, generator=torch.Generator().manual_seed(1)).clamp(1e-6, 1 - 1e-6)
    for drawn in (distribution.sample(uniform), distribution.mode):
        assert bool(mask.gather(-1, drawn[:, None]).all())
        assert torch.equal(drawn, drawn.clone())
    again = MaskedCategorical(logits, mask)
    assert torch.equal(distribution.sample(uniform), again.sample(uniform))


@pytest.mark.parametrize(("amp_dtype", "bound"), [(None, 1e-5), (torch.bfloat16, 0.02)])
def test_the_first_minibatch_is_on_policy_with_half_precision_on(amp_dtype, bound) -> None:
    agent = agent_with(amp_dtype)
    for episode in range(3):
        rollout = synthetic_rollout(agent, 4, 8, 2, seed=episode, episode=episode)
        metrics = agent.update(rollout)
        assert metrics["first_ratio_max"] == pytest.approx(1.0, abs=bound)
        assert metrics["first_kl"] == pytest.approx(0.0, abs=bound**2 + 1e-6)


def test_a_rollout_in_half_precision_does_not_break_the_next_backward() -> None:
    """Casts cached without gradients would cut the weights off from the loss."""
    agent = agent_with(torch.bfloat16)
    rollout = synthetic_rollout(agent, 4, 8, 2, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        agent.begin(torch.arange(8), 1)
        agent.act(picked(rollout.observation, 0), 0)
        metrics = agent.update(rollout)
    assert all(math.isfinite(metrics[f"head_grad_norms/{head}"]) for head in (*HEADS, "value"))
    assert all(p.grad is not None for p in agent.policy.parameters())


@needs_bfloat16
def test_no_cast_is_cached_beyond_the_trunk() -> None:
    """On a CPU a cached cast does no harm today, so the test checks that none is cached."""
    policy = agent_with(torch.bfloat16).policy
    inside = []
    policy.lstm.register_forward_hook(
        lambda *_: inside.append(
            (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled())
        )
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        policy.run_lstm(torch.zeros(1, 2, 16), policy.initial_hidden(2))
    assert inside == [(True, False)]


def real_update(settings: dict) -> tuple[PPOAgent, dict]:
    """Run one small round of the ticket's training: real hosts, rollout and update."""
    config = unflatten(
        {
            "task": "digits_shift", "envs": 8, "group_size": 4, "episode_length": 8,
            "max_batches": 2, "batch_size": 16, "lstm_hidden": 32, "threads": 1,
        }
        | settings,
        TrainConfig(),
    )  # fmt: skip
    device = resolve_device(config.machine.device)
    environment = build_environment(config, (device,))
    assert environment.precision.enabled == config.machine.use_amp
    agent = build_agent(config, device)
    with torch.no_grad():  # every head must be used in an episode this short
        agent.policy.op_head.out.bias.zero_()
    metrics = agent.update(collect(environment, agent, 0))
    return agent, metrics


def assert_heads_have_gradients(agent: PPOAgent, metrics: dict) -> None:
    for head in (*HEADS, "value"):
        assert math.isfinite(metrics[f"head_grad_norms/{head}"]), head
        for parameter in agent.policy.head_parameters(head):
            assert parameter.grad is not None, head
            assert bool(parameter.grad.isfinite().all()), head
    assert metrics["refused"] == 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_amp": True, "backend": "torch"},
        {"use_amp": True, "backend": "torch", "amp_dtype": "float16"},
        {"amp_policy": True},
        {"use_amp": True, "backend": "torch", "amp_policy": True},
    ],
)
def test_head_gradients_finite_cpu(settings) -> None:
    assert_heads_have_gradients(*real_update(settings))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_head_gradients_finite_cpu_compiled_with_amp(dtype: str) -> None:
    """The compiler runs for real: encoder and loss are compiled, trunk and hosts in half."""
    amp = {"use_amp": True, "backend": "torch", "amp_dtype": dtype}
    amp |= {"amp_policy": dtype == "bfloat16"}  # a float16 policy needs a GPU
    agent, metrics = real_update(amp | {"compile": "default"})
    assert agent.compiled.active
    assert_heads_have_gradients(agent, metrics)


def test_a_head_without_gradients_is_reported_as_missing() -> None:
    """The ticket's symptom, made by hand: the head is cut off, and the metric shows it."""
    agent = agent_with()
    rollout = synthetic_rollout(agent, 4, 8, 2, seed=1)
    for parameter in agent.policy.head_parameters("slot"):
        parameter.requires_grad_(False)
    metrics = agent.update(rollout)
    assert metrics["head_grad_norms/slot"] is None
    assert math.isfinite(metrics["head_grad_norms/op"])


@pytest.mark.parametrize("tf32", [True, False])
def test_head_gradients_finite_cuda_default(cuda: str, tf32: bool) -> None:
    with arithmetic(torch.device("cuda:0"), 1, tf32):
        agent, metrics = real_update({"device": "cuda:0", "compile": "off"})
    assert_heads_have_gradients(agent, metrics)


def test_head_gradients_finite_cuda_compiled(cuda: str) -> None:
    agent, metrics = real_update({"device": "cuda:0", "compile": "default"})
    assert agent.compiled.active
    assert_heads_have_gradients(agent, metrics)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_head_gradients_finite_cuda_with_amp(cuda: str, dtype: str) -> None:
    settings = {"device": "cuda:0", "use_amp": True, "amp_policy": True, "amp_dtype": dtype}
    assert_heads_have_gradients(*real_update(settings))
