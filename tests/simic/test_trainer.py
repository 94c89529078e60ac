"""The offline trainer: its gradient, masks, and the closure that is compiled, in any precision."""

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.exc import InductorError
from torch.distributions import Categorical

from esper.leyline.actions import (
    CANONICAL_CHOICE,
    CHOICE_HEADS,
    HEAD_WIDTHS,
    HEADS,
    RELEVANT_HEADS,
    Op,
)
from esper.leyline.config import LearnerConfig
from esper.simic import trainer as trainer_module
from esper.simic.growth.agent import GrowthMoments
from esper.simic.normalise import RunningMoments
from esper.simic.offline.methods import BehaviourCloning
from esper.simic.records.episodes import Episodes
from esper.simic.trainer import Batch, Loss, SlotFeatures, Trainer, _PolicyNetwork
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from recorded_episodes import synthetic_episodes, whole_batch
from synthetic import CPU, only_op, random_observation

LENGTHS = [7, 4, 7, 5, 6, 7]
WIDTH = 16


def policy_of(seed: int = 0, amp_dtype: torch.dtype | None = None) -> FactoredLSTM:
    """A policy with changed weights: initial heads are nearly uniform and would hide mistakes."""
    torch.manual_seed(seed)
    policy = FactoredLSTM(WIDTH)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    policy.amp_dtype = amp_dtype
    return policy


def trainer_of(
    compile_mode: str = "off",
    amp_dtype: torch.dtype | None = None,
    loss: Callable[[RunningMoments], Loss] = lambda moments: BehaviourCloning(0.5, moments),
    episodes: Episodes | None = None,
    **settings: Any,
) -> Trainer:
    """A trainer with moments of other observations; by default it clones."""
    moments, returns = GrowthMoments(CPU), RunningMoments((), CPU)
    moments.update(random_observation((5, 8), 3, seed=9), None)
    returns.update(torch.randn(50, generator=torch.Generator().manual_seed(3)) * 3.0 + 1.0)
    config = LearnerConfig(**({"max_gradient_norm": 1e9} | settings))
    policy = policy_of(amp_dtype=amp_dtype)
    return Trainer(policy, moments, returns, loss(returns), config, CPU, compile_mode)


def gradients_of(trainer: Trainer, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The gradients at the optimizer's step, and the metrics."""
    found: dict[str, Tensor] = {}

    def step(skip: Tensor) -> None:
        assert float(skip) == 0.0
        named = trainer.policy.named_parameters()
        found.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    trainer._step_unless = step
    return found, trainer.step(batch)


# --- the batch ------------------------------------------------------------------------------------


def test_a_batch_begins_with_the_fields_of_the_training_step() -> None:
    assert Batch._fields[:5] == (
        "features", "metric_sequence", "seed_idx", "blueprint_idx", "returns",
    )  # fmt: skip
    episodes = synthetic_episodes(LENGTHS)
    batch = whole_batch(episodes)
    assert torch.equal(batch.actions, episodes.actions)
    assert torch.equal(batch.seed_idx, episodes.actions[..., HEADS.index("slot")])
    assert torch.equal(batch.blueprint_idx, episodes.actions[..., HEADS.index("blueprint")])
    assert torch.equal(batch.metric_sequence, episodes.observation.host)
    for name, x in episodes.observation.tensors().items():
        assert torch.equal(batch.observation.tensors()[name], x), name


def test_the_network_is_the_policy_that_ppo_trains_behind_its_normalisation() -> None:
    trainer, batch = trainer_of(), whole_batch(synthetic_episodes(LENGTHS))
    assert isinstance(trainer.network, _PolicyNetwork)
    assert trainer.network.policy is trainer.policy
    normalised = trainer.moments.normalise(batch.observation)
    assert not torch.equal(normalised.host, batch.metric_sequence)
    hidden = trainer.policy.initial_hidden(len(LENGTHS))
    expected = trainer.policy.evaluate_actions(normalised, batch.actions, hidden)
    found = trainer.network(batch)
    for name in ("log_prob", "head_entropy", "value"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


# --- the gradient ---------------------------------------------------------------------------------


def naive_log_prob(
    policy: FactoredLSTM, memory: Tensor, slots: Tensor, legal: Tensor, kinds: Tensor, action: list
) -> Tensor:
    """Log-probability of one action in one step, head by head, with torch.distributions alone."""
    chosen = dict(zip(HEADS, action, strict=True))
    op, matters = chosen["op"], RELEVANT_HEADS[Op(chosen["op"])]

    def log_prob(logits: Tensor, options: Tensor, choice: int) -> Tensor:
        masked = torch.where(options, logits, -math.inf)
        return Categorical(logits=masked).log_prob(torch.tensor(choice))

    total = log_prob(policy.op_head(memory), legal.any(1), op)
    embedded = policy.op_embedding.weight[op]
    if "slot" in matters:
        scores = [policy.slot_head(torch.cat([memory, embedded, slot]))[0] for slot in slots]
        total = total + log_prob(torch.stack(scores), legal[op], chosen["slot"])
    trunk = policy.choice_trunk(torch.cat([memory, embedded, slots[chosen["slot"]]]))
    for head in CHOICE_HEADS:
        if head in matters:
            every = torch.ones(HEAD_WIDTHS[head], dtype=torch.bool)
            options = kinds[chosen["slot"]] if head == "blueprint" else every
            total = total + log_prob(policy.choice_heads[head](trunk), options, chosen[head])
    return total


def naive_clone_loss(
    trainer: Trainer, batch: Batch, value_weight: float
) -> tuple[Tensor, nn.Module]:
    """The loss of cloning in float64, one step of one episode at a time; and its policy."""
    policy = copy.deepcopy(trainer.policy).double()
    host, slots = trainer.moments.host, trainer.moments.slots
    returns, observed = trainer.return_moments, batch.observation
    total, steps = torch.zeros((), dtype=torch.float64), 0
    for b in range(batch.returns.shape[1]):
        hidden = policy.initial_hidden(1)
        for t in range(int(batch.weight[:, b].sum())):
            seen = type(observed)(
                host.normalise(observed.host[t, b]).double(),
                slots.normalise(observed.slots[t, b]).double(),
                observed.blueprints[t, b],
                observed.critic[t, b].double(),
                type(observed.masks)(observed.masks.slots[t, b], observed.masks.kinds[t, b]),
            )
            features, embedded = policy.encode(seen)
            memory, hidden = policy.lstm(features[None, None], hidden)
            memory = memory[0, 0]
            legal, kinds = seen.masks.slots, seen.masks.kinds
            action = batch.actions[t, b].tolist()
            nll = -naive_log_prob(policy, memory, embedded, legal, kinds, action)
            value = policy.value_head(torch.cat([memory, seen.critic]))[0]
            target = (batch.returns[t, b].double() - returns.mean) / returns.deviation
            total = total + nll + value_weight * 0.5 * (value - target) ** 2
            steps += 1
    return total / steps, policy


@pytest.mark.parametrize("value_weight", [0.0, 0.7])
def test_the_gradient_of_cloning_is_that_of_a_naive_loop(value_weight: float) -> None:
    trainer = trainer_of(loss=lambda moments: BehaviourCloning(value_weight, moments))
    batch = whole_batch(synthetic_episodes(LENGTHS))
    assert set(batch.actions[..., 0].flatten().tolist()) == {int(op) for op in Op}
    expected, policy = naive_clone_loss(trainer, batch, value_weight)
    expected.backward()
    found, metrics = gradients_of(trainer, batch)
    assert float(metrics["loss"]) == pytest.approx(expected.item(), rel=1e-5)
    scale = max(float(p.grad.abs().max()) for p in policy.parameters() if p.grad is not None)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(
            found[name].double(), parameter.grad, rtol=1e-4, atol=1e-6 * scale, msg=name
        )


def test_padding_changes_neither_loss_nor_gradient() -> None:
    """Neither steps after the end of an episode nor slots that a host does not have."""
    alone = synthetic_episodes([4, 4])
    batch = whole_batch(alone)

    def longer(x: Tensor) -> Tensor:
        return torch.cat([x, x[:1], x[:1]])

    padded = Batch(
        SlotFeatures(*map(longer, batch.features)), *map(longer, batch[1:-1]), batch.group
    )
    padded.weight[4:] = 0.0
    wide = padded._replace(
        features=SlotFeatures(
            nn.functional.pad(padded.features.measures, (0, 0, 0, 2)),
            nn.functional.pad(padded.features.blueprints, (0, 2)),
            nn.functional.pad(padded.features.legal_ops, (0, 2)),
            nn.functional.pad(padded.features.legal_blueprints, (0, 0, 0, 2)),
        )
    )
    expected, metrics = gradients_of(trainer_of(), batch)
    found, others = gradients_of(trainer_of(), wide)
    for name in ("loss", "negative_log_likelihood", "entropy", "value_loss"):
        assert float(others[name]) == pytest.approx(float(metrics[name]), rel=1e-5), name
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_illegal_options_have_probability_zero_and_no_gradient() -> None:
    seen = random_observation((5, 6), 3, seed=1)
    seen.masks.slots[:, :, Op.PRUNE] = False
    seen.masks.slots[:, :, Op.GERMINATE] = True
    seen.masks.kinds[..., 7] = False
    batch = whole_batch(synthetic_episodes([5] * 6, observation=seen))
    assert bool((batch.actions[..., 0] == Op.GERMINATE).any())
    found, _ = gradients_of(trainer_of(), batch)
    ops, kinds = found["op_head.out.bias"], found["choice_heads.blueprint.bias"]
    assert ops[Op.PRUNE] == 0.0
    assert kinds[7] == kinds[0] == 0.0
    assert int((ops != 0.0).sum()) == len(Op) - 1
    assert float(kinds.abs().max()) > 0.0
    germinates = batch.actions[..., 0] == Op.GERMINATE
    with torch.no_grad():
        forbidden = batch._replace(blueprint_idx=torch.where(germinates, 7, batch.blueprint_idx))
        probability = trainer_of().network(forbidden).log_prob.exp()
    assert bool((probability[germinates] == 0.0).all())
    assert bool((probability[~germinates] > 0.0).all())


@pytest.mark.parametrize("op", list(Op))
def test_only_heads_that_matter_for_the_op_get_a_gradient(op: Op) -> None:
    seen = only_op(random_observation((4, 6), 3, seed=2), op)
    batch = whole_batch(synthetic_episodes([4] * 6, observation=seen))
    trainer = trainer_of(loss=lambda moments: BehaviourCloning(0.0, moments))
    _, metrics = gradients_of(trainer, batch)
    for head in HEADS:
        norm = float(metrics[f"head_grad_norms/{head}"])
        # The only legal op is certain.
        assert (norm > 0.0) == (head in RELEVANT_HEADS[op] and head != "op"), head
    assert float(metrics["head_grad_norms/value"]) == 0.0
    assert CANONICAL_CHOICE.keys() < set(HEADS)


# --- the closure ----------------------------------------------------------------------------------


def test_a_step_moves_every_weight_and_leaves_no_gradient() -> None:
    trainer, batch = trainer_of(learning_rate=1e-2), whole_batch(synthetic_episodes(LENGTHS))
    before = copy.deepcopy(trainer.policy.state_dict())
    metrics = trainer.step(batch)
    assert float(metrics["refused"]) == 0.0
    assert all(p.grad is None for p in trainer.policy.parameters())
    for name, parameter in trainer.policy.named_parameters():
        assert not torch.equal(before[name], parameter), name
    losses = [float(trainer.step(batch)["loss"]) for _ in range(30)]
    assert losses[-1] < 0.8 * float(metrics["loss"])


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    trainer, batch = trainer_of(), whole_batch(synthetic_episodes(LENGTHS))
    trainer.step(batch)
    before = copy.deepcopy(trainer.state())
    broken = batch._replace(returns=batch.returns.clone())
    broken.returns[2, 1] = math.nan
    assert float(trainer.step(broken)["refused"]) == 1.0
    for name, x in before["policy"].items():
        assert torch.equal(trainer.state()["policy"][name], x), name
    for name, x in before["optimizer"]["lstm.weight_hh_l0"].items():
        assert torch.equal(trainer.optimizer.state()["lstm.weight_hh_l0"][name], x), name


def test_the_gradient_is_clipped() -> None:
    batch = whole_batch(synthetic_episodes(LENGTHS))
    free, metrics = gradients_of(trainer_of(), batch)
    clipped, same = gradients_of(trainer_of(max_gradient_norm=0.01), batch)
    assert float(same["grad_norm"]) == float(metrics["grad_norm"]) > 0.01
    for name, gradient in free.items():
        expected = gradient * (0.01 / float(metrics["grad_norm"]))
        torch.testing.assert_close(clipped[name], expected, rtol=1e-3, atol=1e-8)


# --- compilation ----------------------------------------------------------------------------------


def test_the_whole_step_is_compiled_for_any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compile_function(function: Callable, **options: Any) -> Callable:
        asked.append((function, options))
        return lambda batch: function(batch) | {"compiled": torch.ones(())}

    monkeypatch.setattr(torch, "compile", compile_function)
    trainer = trainer_of("default")
    assert asked == [(trainer._train_step, {"dynamic": True, "mode": "default"})]
    assert trainer.compiled
    assert "compiled" in trainer.step(whole_batch(synthetic_episodes(LENGTHS)))


def test_off_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *arguments, **named: 1 / 0)
    trainer = trainer_of("off")
    assert not trainer.compiled
    trainer.step(whole_batch(synthetic_episodes(LENGTHS)))


NO_COMPILER = InductorError(RuntimeError("no such compiler\nand a long trace"), None)


def broken_at(monkeypatch: pytest.MonkeyPatch, when: str, error: Exception = NO_COMPILER) -> None:
    def compile_function(function: Callable, **options: Any) -> Callable:
        if when == "construction":
            raise error

        def broken(batch: Batch) -> None:
            if when == "backward":
                function.__self__.network(batch).log_prob.sum().backward()
            raise error

        return broken

    monkeypatch.setattr(torch, "compile", compile_function)


@pytest.mark.parametrize("when", ["first call", "backward"])
def test_another_error_of_a_compiled_step_is_raised(when, monkeypatch, caplog) -> None:
    broken_at(monkeypatch, when, RuntimeError("a fault"))
    trainer = trainer_of("default")
    with pytest.raises(RuntimeError, match="a fault"):
        trainer.step(whole_batch(synthetic_episodes(LENGTHS)))
    assert trainer.compiled
    assert not caplog.records


@pytest.mark.parametrize("when", ["construction", "first call", "backward"])
def test_a_failed_compilation_is_one_line_and_steps_run_eagerly(when, monkeypatch, caplog) -> None:
    batch = whole_batch(synthetic_episodes(LENGTHS))
    eager = trainer_of("off")
    expected = [eager.step(batch), eager.step(batch)]
    broken_at(monkeypatch, when)
    with caplog.at_level(logging.WARNING, "esper"):
        trainer = trainer_of("default")
        found = [trainer.step(batch), trainer.step(batch)]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["compile: RuntimeError: no such compiler; continuing without compilation"]
    assert not trainer.compiled
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ("loss", "grad_norm"))
    for name, x in eager.policy.state_dict().items():
        assert torch.equal(trainer.policy.state_dict()[name], x), name


def test_too_little_memory_is_not_taken_for_a_failed_compilation(monkeypatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: full)
    trainer = trainer_of("default")
    with pytest.raises(torch.OutOfMemoryError):
        trainer.step(whole_batch(synthetic_episodes(LENGTHS)))
    assert trainer.compiled


def test_an_error_outside_the_compiler_is_raised() -> None:
    batch = whole_batch(synthetic_episodes(LENGTHS))
    with pytest.raises((RuntimeError, IndexError)):
        trainer_of().step(batch._replace(choices=batch.choices + 1000))


@pytest.mark.slow
def test_the_compiled_step_is_the_eager_one_and_is_traced_once(monkeypatch) -> None:
    """Traced without code generation, which takes a minute; the LSTM stays eager."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compile_function = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, dynamic, mode: compile_function(
            function, dynamic=dynamic, backend="aot_eager"
        ),
    )
    eager, compiled = trainer_of("off"), trainer_of("default")
    graphs = []
    # None of these is the size of another axis, which torch would take to be the same one.
    for count in (11, 10, 9):
        batch = whole_batch(synthetic_episodes((2 * LENGTHS)[:count]))
        one, other = eager.step(batch), compiled.step(batch)
        for name in ("loss", "negative_log_likelihood", "value_loss", "grad_norm"):
            assert float(other[name]) == pytest.approx(float(one[name]), rel=1e-4), name
        graphs.append(counters["stats"]["unique_graphs"])
    assert compiled.compiled
    assert graphs[0] > 1
    assert graphs[0] == graphs[2]


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_encoder_and_lstm_are_in_half_precision_and_nothing_else(dtype) -> None:
    trainer, seen = trainer_of(amp_dtype=dtype), {}

    def watch(name: str) -> Callable:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            enabled = torch.is_autocast_enabled("cpu")
            seen[name] = torch.get_autocast_dtype("cpu") if enabled else None

        return hook

    for name in ("encoder", "lstm", "op_head", "value_head"):
        trainer.policy.get_submodule(name).register_forward_hook(watch(name))
    metrics = trainer.step(whole_batch(synthetic_episodes(LENGTHS)))
    assert seen == {"encoder": dtype, "lstm": dtype, "op_head": None, "value_head": None}
    assert metrics["loss"].dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in trainer.policy.parameters())
    assert (trainer.scaler is not None) == (dtype == torch.float16)
    assert float(metrics["refused"]) == 0.0


def test_half_precision_learns_what_full_precision_learns() -> None:
    batch = whole_batch(synthetic_episodes(LENGTHS))
    exact, metrics = gradients_of(trainer_of(), batch)
    for dtype in (torch.bfloat16, torch.float16):
        trainer = trainer_of(amp_dtype=dtype)
        if trainer.scaler is not None:
            trainer.scaler.scale.fill_(256.0)
        rough, others = gradients_of(trainer, batch)
        assert float(others["loss"]) == pytest.approx(float(metrics["loss"]), rel=2e-2)
        for name, gradient in exact.items():
            assert float((rough[name] - gradient).norm()) <= 0.1 * float(gradient.norm()) + 1e-3


def test_float16_is_scaled_and_an_overflow_is_skipped_without_refusal() -> None:
    trainer = trainer_of(amp_dtype=torch.float16)
    batch = whole_batch(synthetic_episodes(LENGTHS))
    trainer.scaler.scale.fill_(2.0**8)
    exact, _ = gradients_of(trainer_of(), batch)
    found, metrics = gradients_of(trainer, batch)
    norms = [sum(float(g.square().sum()) for g in all_.values()) for all_ in (found, exact)]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)
    assert float(metrics["grad_norm"]) == pytest.approx(norms[1] ** 0.5, rel=0.05)
    assert float(trainer.scaler.good_steps) == 1.0

    trainer = trainer_of(amp_dtype=torch.float16)
    own, before = trainer.scaler.product, copy.deepcopy(trainer.policy.state_dict())
    trainer.scaler.product = lambda loss: own(loss) * math.inf
    assert float(trainer.step(batch)["refused"]) == 0.0
    assert float(trainer.scaler.scale) == 2.0**15
    assert all(torch.equal(before[n], x) for n, x in trainer.policy.state_dict().items())


# --- optimizer and transfer -----------------------------------------------------------------------


def test_the_optimizer_has_the_rate_of_the_settings() -> None:
    trainer = trainer_of(learning_rate=3e-4)
    assert [float(rate) for rate in trainer.optimizer.rates.values()] == pytest.approx([3e-4] * 2)


def test_a_batch_is_copied_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def to(self: Tensor, device: Any, non_blocking: bool = False) -> Tensor:
        asked.append((str(device), non_blocking))
        return self

    batch, trainer = whole_batch(synthetic_episodes(LENGTHS)), trainer_of()
    monkeypatch.setattr(torch.Tensor, "to", to)
    batch.to(torch.device("cuda:0"))
    tensors = len(batch.features) + len(batch) - 1
    assert asked == [("cuda:0", True)] * tensors
    monkeypatch.undo()
    moved: list[Any] = []
    own = trainer_module.Batch.to
    monkeypatch.setattr(
        trainer_module.Batch, "to", lambda self, device: moved.append(device) or own(self, device)
    )
    trainer.step(batch)
    assert moved == [CPU]


# --- state ----------------------------------------------------------------------------------------


def test_a_restored_trainer_continues_with_the_same_bits() -> None:
    batches = [whole_batch(synthetic_episodes(LENGTHS, seed=i)) for i in range(4)]
    whole, first, second = (trainer_of(amp_dtype=torch.float16) for _ in range(3))
    for batch in batches:
        whole.step(batch)
    for batch in batches[:2]:
        first.step(batch)
    second.policy.load_state_dict(policy_of(seed=5).state_dict())
    second.load_state(copy.deepcopy(first.state()))
    for batch in batches[2:]:
        second.step(batch)
    assert second.steps == 4
    for name, x in whole.policy.state_dict().items():
        assert torch.equal(second.policy.state_dict()[name], x), name
