"""A user's module as host, compared with the same module in a Python loop, in float64."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from esper.kasmina import ModuleHost, Slot
from esper.leyline.errors import UsageError
from esper.runtime.tasks import Task
from esper.simic.growth.collect import collect
from esper.tamiyo.random_actor import RandomActor
from esper.tolaria.backends import HeldBack, Variant
from esper.tolaria.backends.choice import choose_backend
from esper.tolaria.backends.torch import FunctionalBackend
from esper.tolaria.plan import Seeds
from oracles.residual import CLASSES, IMAGE, SLOTS, NaiveResidual, ResidualNet
from residual_hosts import gardens, random_numbers, residual_host
from support import (
    CPU,
    F64,
    FULL,
    Garden,
    assert_same,
    naive_environments,
    optimisation,
    random_batches,
    seed_state,
    seed_views,
    small_engine,
    small_environments,
    small_host,
    small_task,
    train,
    train_naively,
)


def test_slots_are_found_in_the_order_of_the_forward_pass() -> None:
    slots = residual_host().slots
    assert tuple(slot.name for slot in slots) == SLOTS
    assert [slot.channels for slot in slots] == [4, 4, 5, 6]
    assert [slot.size for slot in slots] == [(6, 6), (6, 6), (3, 3), (1, 1)]
    assert [slot.family for slot in slots] == ["conv", "conv", "conv", "mlp"]
    assert [slot.depth for slot in slots] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("garden", gardens(14), ids=["first", "second", "third", "fourth"])
def test_five_steps_and_every_ablation_match_the_naive_loop(garden: Garden) -> None:
    host, rows = residual_host(), len(garden)
    stack, state = random_numbers(host, rows), seed_state(garden, 4)
    settings = optimisation(rows, 4)
    naive = naive_environments(host, stack, garden, settings, NaiveResidual)
    batches = random_batches(host, rows)
    backend = FunctionalBackend(host, FULL)
    epoch = train(host, stack, state, batches, settings, backend)
    train_naively(naive, batches)
    views, fixed = host.layout.views(stack.host), host.buffers.views(stack.buffers)
    for n, environment in enumerate(naive):
        for name, parameter in environment.host.named_parameters():
            assert_same((views | fixed)[name][n], parameter, f"{n} {name}")
        for name, buffer in environment.host.named_buffers():
            assert_same(fixed[name][n], buffer, f"{n} {name}")
        for s, slot in enumerate(host.slots):
            seed = environment.seeds[slot.name]
            own = seed_views(slot, seed.blueprint, stack.seeds[s][n])
            for name, parameter in seed.named().items():
                assert_same(own[name], parameter, f"{n} {slot.name} {seed.blueprint} {name}")
        assert_same(epoch.loss[n], sum(environment.losses) / 5, f"loss of {n}")
        assert_same(epoch.host_gradient_norm[n], environment.host_norm, f"norm of {n}")

    generator = torch.Generator().manual_seed(4)
    images = torch.randn(1, 130, *IMAGE, generator=generator, dtype=F64)
    labels = torch.randint(CLASSES, (1, 130), generator=generator)
    variants = []
    for s in range(4):
        alpha = state.alpha.clone()
        alpha[:, s] = 0.0
        variants.append(Variant(s, torch.arange(rows), alpha))
    held_back = HeldBack(images, labels, torch.zeros(rows, dtype=torch.long))
    whole, without = backend.evaluate(stack, Seeds.acting(state), held_back, variants)
    plain = images[0].permute(0, 3, 1, 2)
    for n, environment in enumerate(naive):
        idle = tuple(s.name for i, s in enumerate(host.slots) if state.alpha[n, i] == 0)
        for scores, gone in [(whole, ()), *zip(without, [(name,) for name in SLOTS], strict=True)]:
            loss, accuracy, expected = environment.score(plain, labels[0], idle + gone)
            assert_same(scores.loss[n], loss, f"{n} without {gone}")
            assert_same(scores.accuracy[n], accuracy, f"{n} without {gone}")
            assert_same(scores.expected[n], expected, f"{n} without {gone}")


def test_a_host_with_nan_does_not_affect_the_others() -> None:
    host, rows = residual_host(), 3
    garden = gardens(rows)[0]
    results = []
    for value in (0.0, float("nan")):
        stack, state = random_numbers(host, rows), seed_state(garden, 4)
        stack.host[1] += value
        train(host, stack, state, random_batches(host, rows), None, FunctionalBackend(host, FULL))
        results.append(stack)
    clean, ill = results
    assert ill.host[1].isnan().any()
    for row in (0, 2):
        torch.testing.assert_close(ill.host[row], clean.host[row], rtol=0, atol=1e-12)


def test_fresh_hosts_use_the_modules_initialisation_and_keep_torchs_generator() -> None:
    before = torch.random.get_rng_state()
    engine = small_engine(residual_host(), 3, groups=[0, 0, 1])
    assert torch.equal(torch.random.get_rng_state(), before)
    stack = engine.stack
    assert torch.equal(stack.host[0], stack.host[1])
    assert not torch.equal(stack.host[0], stack.host[2])
    first = stack.host.clone()
    engine.reset(1)
    assert not torch.equal(stack.host, first)
    engine.reset(0)
    assert torch.equal(stack.host, first)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = ResidualNet()
    parameters, buffers = engine.host.initial_values([5])
    views = engine.host.layout.views(parameters) | engine.host.buffers.views(buffers)
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        assert torch.equal(views[name][0], value.detach().double()), name


def test_user_modules_use_the_functional_backend_for_every_setting(caplog) -> None:
    for name in ("auto", "torch", "native"):
        backend = choose_backend(name, residual_host(), FULL, torch.float32, CPU)
        assert isinstance(backend, FunctionalBackend)


class Net(nn.Module):
    """A small network of given layers."""

    def __init__(self, *layers: nn.Module, outputs: int = CLASSES, twice: bool = False):
        super().__init__()
        self.layers, self.twice = nn.Sequential(*layers), twice
        self.head = nn.LazyLinear(outputs)
        self(torch.zeros(2, IMAGE[2], *IMAGE[:2]))

    def forward(self, x):
        x = self.layers(self.layers(x)) if self.twice else self.layers(x)
        return self.head(x.flatten(1))


class Branches(Net):
    def forward(self, x):
        x = self.layers(x)
        return self.head(x.flatten(1)) if not self.training or x.sum() >= 0 else x


FAULTS: list[tuple[Callable[[], object], str]] = [
    (lambda: Net(nn.ReLU()), r"model: Net has no slot; put an esper.kasmina.Slot\(channels\)"),
    (lambda: Net(Slot(3)), r"passes \(2, 2, 6, 6\) to the slot 'layers.0' of 3"),
    (lambda: Net(Slot(2), outputs=7), r"returns \(2, 7\) for 2 images; return logits \(2, 4\)"),
    (lambda: Net(Slot(2), twice=True), r"calls the slot 'layers.0' 2 times in a forward pass"),
    (lambda: Net(nn.Conv2d(2, 2, 3), nn.Flatten(), Slot(32), nn.Dropout()), "dropout"),
    (lambda: Net(nn.BatchNorm2d(2, momentum=None), Slot(2)), "BatchNorm without momentum"),
    (lambda: Branches(Slot(2)), "does not train under torch.vmap"),
    (lambda: nn.Sequential(nn.Conv2d(5, 1, 3), Slot(1)), r"rejects images \(2, 2, 6, 6\)"),
    (lambda: nn.Sequential(nn.LazyConv2d(1, 3), Slot(1)), "it has lazy layers"),
    (lambda: 3, "build returns a int; return an nn.Module"),
    (lambda: 1 / 0, "build fails .ZeroDivisionError: division by zero"),
]


@pytest.mark.parametrize(("build", "says"), FAULTS, ids=[says[:24] for _, says in FAULTS])
def test_an_unsupported_module_is_rejected_with_one_line(build, says: str) -> None:
    with pytest.raises(UsageError, match=says) as fault:
        _ = ModuleHost(build, CLASSES, IMAGE).slots
    assert "\n" not in str(fault.value)


def test_a_host_leaves_no_hooks_in_its_module() -> None:
    host = ModuleHost(lambda: Net(Slot(2)), CLASSES, IMAGE)
    assert len(host.feeding_names) == len(host.slots) == 1
    assert not any(module._forward_pre_hooks for module in host.template.modules())


def module_task(name: str = "own") -> Task:
    return replace(small_task(residual_host()), name=name)


def test_user_modules_and_built_in_hosts_do_not_affect_each_other() -> None:
    """The same actions give the same results with or without the others, on one thread or two."""
    tasks = [small_task(small_host()), module_task()]

    def play(environments: list[int], threads: int) -> tuple[torch.Tensor, torch.Tensor]:
        settings = {"seed": 2, "episode_length": 10, "max_batches": 2, "dtype": F64}
        env = small_environments(tasks, environments, threads=threads, **settings)
        rollout = collect(env, RandomActor(5), 0)
        return rollout.rewards, env.task_of

    whole, task_of = play(list(range(8)), 2)
    assert set(task_of.tolist()) == {0, 1}
    assert whole.isfinite().all()
    for part in ([0, 1, 2, 3], [4, 5, 6, 7], [2, 5]):
        rewards, _ = play(part, 1)
        torch.testing.assert_close(rewards, whole[:, part], rtol=0, atol=1e-5)
