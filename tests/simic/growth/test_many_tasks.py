"""Several tasks at once: each environment gives the results that it gives with its task alone.

Five tasks: hosts of two, three and four slots, one fully connected, and two tasks that share a host
and so a stack, one of which drifts.
"""

import math
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from esper.leyline.actions import BLUEPRINTS, Op
from esper.leyline.config import LearnerConfig
from esper.leyline.stages import Stage
from esper.runtime.data import Dataset
from esper.runtime.tasks import Drift, Task
from esper.simic.growth.agent import growth_agent
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import Step
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import HOST_FEATURES, Observation
from oracles.naive import CONV_BRANCHES, MLP_BRANCHES
from support import CPU, F64, small_environments, small_host, small_mlp, small_task
from synthetic import canonical_action, random_observation

LENGTH, GROUP_SIZE, WIDEST = 12, 2, 4
HOSTS = {
    "three": small_host(),
    "two": small_host(pools=0, image=(5, 4, 1), classes=3),
    "four": small_host(channels=(3, 5, 4)),
    "mlp": small_mlp(),
}


def plain(host, level: float) -> Dataset:
    """A data set whose images have one constant value, which identifies it."""

    def split(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % host.classes
        return torch.full((count, *host.image), level, dtype=F64), labels

    return Dataset(*split(20), *split(130), *split(30), classes=host.classes)


def drifting(never: float = 0.25, earliest: float = 0.2, latest: float = 0.8) -> Task:
    """Images of 1 at first, images of -2 after the drift."""
    host = HOSTS["three"]
    before, after = plain(host, 1.0), plain(host, -2.0)
    drift = Drift(lambda: after, earliest, latest, never)
    task = replace(small_task(host), data=lambda: before, drift=drift)
    return replace(task, name="drifting", learning_rate=2e-3)


TASKS = [
    *(
        replace(small_task(host, seed), name=name)
        for seed, (name, host) in enumerate(HOSTS.items())
    ),
    drifting(),
]
SLOTS = [len(task.host.slots) for task in TASKS]
COUNT = GROUP_SIZE * 2 * len(TASKS)


def growth(
    tasks: list[Task] = TASKS, environments: list[int] | Tensor | int = COUNT, **settings
) -> GrowthEnv:
    config = {"seed": 7, "group_size": GROUP_SIZE, "episode_length": LENGTH, "dtype": F64}
    config |= {"one_at_a_time": False, "backend": "torch"} | settings
    return small_environments(tasks, environments, **config)


def gardener() -> PPOAgent:
    """An untrained policy, biased to germinate often."""
    agent = growth_agent(LearnerConfig(lstm_hidden=16), 3, CPU)
    with torch.no_grad():
        agent.policy.op_head.out.bias[Op.GERMINATE] = 4.0
    return agent


@dataclass
class Trace:
    """The recorded steps of an episode."""

    env: GrowthEnv
    task_of: Tensor
    rollout: Rollout
    steps: list[Step]

    def results(self, t: int) -> dict[str, Tensor]:
        """All results of all environments after step ``t``."""
        step = self.steps[t]
        report = step.report
        tensors = {"reward": step.reward}
        parts = {"": report, "scores": report.scores, "twins": report.twin_scores}
        parts |= {"before": report.before, "acted": report.acted, "after": report.after}
        parts |= {"signals": report.signals}
        if report.committed is not None:
            parts |= {"committed": report.committed, "committed twins": report.twin_committed}
        for name, part in parts.items():
            for f in fields(part):
                value = getattr(part, f.name)
                if isinstance(value, Tensor):
                    tensors[f"{name} {f.name}"] = value
        return tensors | {f"seen {n}": x for n, x in step.observation.tensors().items()}


def play(env: GrowthEnv, episode: int = 0) -> Trace:
    steps: list[Step] = []
    rollout = collect(env, gardener(), episode, lambda t, actions, step: steps.append(step))
    return Trace(env, env.task_of, rollout, steps)


@cache
def together() -> Trace:
    """An episode with all tasks at once."""
    return play(growth())


@cache
def alone(task: int) -> tuple[list[int], Trace]:
    """An episode of the environments that draw a task, with that task alone."""
    identities = [n for n in range(COUNT) if together().task_of[n] == task]
    return identities, play(growth([TASKS[task]], identities))


def cut(tensor: Tensor, like: Tensor) -> Tensor:
    """The leading entries of every axis, cut to the shape of ``like``."""
    for axis, size in enumerate(like.shape):
        tensor = tensor.narrow(axis, 0, size)
    return tensor


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    exact = not found.is_floating_point()
    assert found.dtype == expected.dtype, what
    # Signals and observations are stored in float32.
    bound = 0.0 if exact else 1e-9 if found.dtype == F64 else 2e-5
    torch.testing.assert_close(
        found, expected, rtol=bound, atol=bound, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


# --- independence of the other environments ---------------------------------------------------


def test_the_episodes_cover_a_shared_stack_and_all_stages():
    trace = together()
    assert len(trace.env.shards) == 4  # two tasks share one
    stages = torch.stack([step.report.after.stage for step in trace.steps])
    for task, slots in enumerate(SLOTS):
        mine = stages[:, trace.task_of == task]
        assert mine.shape[1] == 2 * GROUP_SIZE
        reached = {Stage(stage) for stage in mine[..., :slots].unique().tolist()}
        assert {Stage.DORMANT, Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING} <= reached
    assert bool((stages == Stage.FOSSILISED).any())


@pytest.mark.parametrize("task", range(len(TASKS)), ids=[task.name for task in TASKS])
def test_an_environment_behaves_as_with_its_task_alone(task: int):
    """The policy chooses the actions in both, so its decisions ignore the padding too."""
    identities, lonely = alone(task)
    assert len(identities) == 2 * GROUP_SIZE
    trace = together()
    assert torch.equal(trace.rollout.actions[:, identities], lonely.rollout.actions)
    for name in ("log_prob", "values"):
        found = getattr(trace.rollout, name)[:, identities]
        torch.testing.assert_close(found, getattr(lonely.rollout, name), rtol=1e-4, atol=1e-4)
    for t in range(LENGTH):
        found, expected = trace.results(t), lonely.results(t)
        assert found.keys() == expected.keys()
        for name, part in expected.items():
            assert_close(cut(found[name][identities], part), part, f"{name} after step {t}")


def test_shards_cost_what_their_hosts_and_rows_do():
    env = growth()
    env.reset(0)
    for shard in env.shards:
        rows = len(shard.engine.rows)
        assert rows < shard.cost == rows * shard.host_parameters


def test_the_order_of_the_environments_does_not_matter():
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(COUNT, generator=generator)
    trace, shuffled = together(), play(growth(environments=order))
    assert torch.equal(shuffled.task_of, trace.task_of[order])
    assert torch.equal(shuffled.rollout.actions, trace.rollout.actions[:, order])
    for t in range(LENGTH):
        found, expected = shuffled.results(t), trace.results(t)
        for name, part in expected.items():
            assert_close(found[name], part[order], f"{name} after step {t}")


def test_several_threads_give_equal_results():
    """With two threads every environment is in another stack, which may change the last bit: see
    ``test_faults.test_a_seed_alone_in_its_call_may_differ_in_the_last_bit``."""
    trace, env = together(), growth(threads=2)
    env.reset(0)
    assert len(env.shards) > len(trace.env.shards)
    for taken, step in zip(trace.rollout.actions, trace.steps, strict=True):
        other = env.step(taken)
        for name in ("loss", "accuracy", "expected"):
            found = getattr(other.report.scores, name)
            assert_close(found, getattr(step.report.scores, name), name)
        assert_close(other.reward, step.reward, "reward")
        assert torch.equal(other.report.after.stage, step.report.after.stage)
        assert torch.equal(other.report.success, step.report.success)


# --- padding ----------------------------------------------------------------------------------


def padded(task_of: Tensor) -> Tensor:
    """Slots that a host does not have, bool ``[N, S]``."""
    return torch.arange(WIDEST) >= torch.tensor(SLOTS)[task_of][:, None]


def test_padded_slots_are_empty_in_every_field():
    trace = together()
    nowhere = padded(trace.task_of)
    assert 0 < int(nowhere.sum()) < nowhere.numel()
    for seen in (growth().reset(0), *(step.observation for step in trace.steps)):
        assert seen.slots.shape[1] == WIDEST
        assert not bool(seen.slots[nowhere].any())
        assert not bool(seen.blueprints[nowhere].any())
        assert not bool(seen.masks.kinds[nowhere].any())
        assert not bool(seen.masks.slots.transpose(1, 2)[nowhere].any())
        assert torch.equal(seen.masks.exists, ~nowhere)
        assert bool(seen.masks.slots[:, Op.WAIT].any(1).all())
    for step in trace.steps:
        report = step.report
        unknown = (
            *(report.signals.contribution, report.signals.health, report.signals.gradient_norm),
            *(report.signals.baseline, report.signals.improvement, report.signals.gradient_ratio),
        )
        for signal in unknown:
            assert bool(signal[nowhere].isnan().all())
        for part in (report.before, report.acted, report.after):
            assert not bool(part.living[nowhere].any())
            assert not bool(part.alpha[nowhere].any())
        assert not bool(report.seed_parameters[nowhere].any())
    last = trace.steps[-1].report
    assert bool(last.shapley[nowhere].isnan().all())
    assert bool(last.interactions[nowhere].isnan().all())
    assert bool(last.interactions.transpose(1, 2)[nowhere].isnan().all())
    assert bool(last.shapley.isfinite().any())
    assert torch.equal(last.shapley.isfinite(), last.acted.alpha > 0)


def test_an_action_in_a_padded_slot_changes_nothing():
    env = growth()
    env.reset(0)
    actions = canonical_action(op=Op.GERMINATE, slot=3, blueprint=1).repeat(COUNT, 1)
    report = env.step(actions).report
    has_four = env.task_of == SLOTS.index(4)
    assert torch.equal(report.success, has_four)
    assert torch.equal(report.after.living.any(1), has_four)


def test_masks_offer_each_family_its_own_blueprints():
    env = growth()
    kinds = env.reset(0).masks.kinds
    for task, spec in enumerate(TASKS):
        offered = kinds[env.task_of == task][:, : SLOTS[task]].flatten(0, 1)
        assert bool((offered == offered[0]).all())
        names = {BLUEPRINTS[kind] for kind in offered[0].nonzero()[:, 0].tolist()}
        assert names == set(MLP_BRANCHES if spec.name == "mlp" else CONV_BRANCHES)


# --- the learner ------------------------------------------------------------------------------


def test_a_policy_learns_from_padded_rollouts_and_moments_ignore_padding():
    rollout, agent = together().rollout, gardener()
    before = [parameter.detach().clone() for parameter in agent.policy.parameters()]
    metrics = agent.update(rollout)
    assert metrics["refused"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())
    after = list(agent.policy.parameters())
    assert all(bool(parameter.isfinite().all()) for parameter in after)
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))

    real = torch.cat(
        [rollout.observation.slots[:, n, : SLOTS[task]].flatten(0, 1)
         for n, task in enumerate(together().task_of.tolist())]
    ).double()  # fmt: skip
    assert agent.moments.slots.count.item() == len(real) < rollout.observation.slots[..., 0].numel()
    torch.testing.assert_close(agent.moments.slots.mean, real.mean(0))
    deviation = (real.var(0, correction=0) + 1e-4).sqrt()
    torch.testing.assert_close(agent.moments.slots.deviation, deviation)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_padding_does_not_change_the_actions_of_a_policy(slots: int):
    """Also after normalisation of the padding's zeros."""
    agent = gardener()
    agent.update(together().rollout)
    seen = random_observation((5, 30), slots, seed=slots)
    wide = Observation(
        host=seen.host, slots=_wide(seen.slots, 2), blueprints=_wide(seen.blueprints, 2),
        critic=seen.critic,
        masks=ActionMasks(_wide(seen.masks.slots, 3), _wide(seen.masks.kinds, 2)),
    )  # fmt: skip
    outcomes = []
    for observation in (seen, wide):
        agent.begin(torch.arange(30), 0)
        taken = []
        for t in range(5):
            now = {name: tensor[t] for name, tensor in observation.tensors().items()}
            taken.append(agent.act(Observation.from_tensors(now), t))
        actions = torch.stack([action for action, _, _ in taken])
        hidden = agent.policy.initial_hidden(30)
        evaluation = agent.policy.evaluate_actions(
            agent.moments.normalise(observation), actions, hidden
        )
        heard = [torch.stack(part) for part in list(zip(*taken, strict=True))[1:]]
        outcomes.append(
            (actions, *heard, evaluation.log_prob, evaluation.head_entropy, evaluation.value)
        )
        assert torch.equal(evaluation.head_choice.any(), torch.tensor(True))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    for narrow, broad in zip(outcomes[0][1:], outcomes[1][1:], strict=True):
        torch.testing.assert_close(narrow, broad, rtol=1e-5, atol=1e-5)


def _wide(tensor: Tensor, axis: int) -> Tensor:
    """Pad with zeros (false) to ten slots."""
    shape = list(tensor.shape)
    shape[axis] = 10 - shape[axis]
    return torch.cat([tensor, tensor.new_zeros(shape)], axis)


# --- draws ------------------------------------------------------------------------------------


def drawn(env: GrowthEnv, episode: int) -> list[int]:
    """The task of each environment, without the cost of an episode."""
    return env._draw(episode).tolist()


def test_consecutive_groups_draw_different_tasks_equally_often():
    env, episodes, tasks = growth(environments=COUNT), 300, len(TASKS)
    counts: list[Counter[int]] = [Counter() for _ in range(COUNT)]
    pairs: Counter[tuple[int, int]] = Counter()
    for episode in range(episodes):
        task_of = drawn(env, episode)
        by_group = task_of[::GROUP_SIZE]
        assert task_of == [task for task in by_group for _ in range(GROUP_SIZE)]
        for first in range(len(by_group) - tasks + 1):
            assert sorted(by_group[first : first + tasks]) == list(range(tasks))
        for n, task in enumerate(task_of):
            counts[n][task] += 1
        pairs[by_group[0], by_group[1]] += 1
    share = episodes / tasks
    for count in counts:
        assert sum((count[task] - share) ** 2 / share for task in range(tasks)) < 23.5  # p = 1e-4
    assert len(pairs) == tasks * (tasks - 1)  # every order occurs


def test_a_subset_of_the_environments_draws_the_same_tasks():
    subset = torch.tensor([11, 2, 3, 17])
    whole, part = growth(), growth(environments=subset)
    for episode in range(20):
        expected = torch.tensor(drawn(whole, episode))[subset]
        assert drawn(part, episode) == expected.tolist()
    other = growth(seed=8)
    assert any(drawn(whole, e) != drawn(other, e) for e in range(20))


def test_a_reset_uses_the_drawn_tasks():
    env = growth()
    for episode in (0, 1, 0):
        env.reset(episode)
        assert env.task_of.tolist() == drawn(env, episode)
        for shard, rows in ((part.shard, part.rows) for part in env.parts):
            assert len({len(TASKS[task].host.slots) for task in env.task_of[rows].tolist()}) == 1
            engine = shard.engine
            for row, environment in enumerate(rows.tolist()):
                task = TASKS[env.task_of[environment]]
                assert engine.bank.tasks[engine.rows.task[row]] == task
                assert engine.optimisation(0).host_learning_rate[row] == task.learning_rate


@pytest.mark.parametrize(("max_seeds", "most"), [(None, SLOTS), (3, [3, 2, 3, 3, 3])])
def test_the_default_limit_of_living_seeds_is_the_number_of_slots(
    max_seeds: int | None, most: list[int]
):
    env = growth(max_seeds=max_seeds)
    observation = env.reset(0)
    for _ in range(WIDEST + 1):
        legal = observation.masks.slots[:, Op.GERMINATE]
        actions = []
        for may, kinds in zip(legal, observation.masks.kinds, strict=True):
            slot = int(may.int().argmax())
            op = Op.GERMINATE if bool(may.any()) else Op.WAIT
            kind = int(kinds[slot].int().argmax())
            actions.append(canonical_action(op=op, slot=slot, blueprint=kind))
        step = env.step(torch.stack(actions))
        assert bool(step.report.success.all())
        observation = step.observation
    living = step.report.after.living.sum(1)
    assert living.tolist() == [most[task] for task in env.task_of]
    left = observation.host[:, HOST_FEATURES.index("budget_left")]
    assert left.tolist() == [0.0] * COUNT


# --- drift ------------------------------------------------------------------------------------


def test_data_change_for_all_rows_at_the_drift():
    """Training and validation data change for every environment of a group and for its twin."""
    groups = 6
    env = growth([drifting(), TASKS[0]], GROUP_SIZE * groups)
    env.reset(0)
    (shard,) = env.shards
    engine, trained, validated = shard.engine, [], []
    train, evaluate = engine.backend.train_epoch, engine.backend.evaluate

    def spying_train(stack, seeds, minibatches, optimisation):
        trained.append(torch.stack([images for images, _ in minibatches]))
        return train(stack, seeds, minibatches, optimisation)

    def spying_evaluate(stack, seeds, held_back, variants, rows=None):
        validated.append(held_back.by_row()[0])
        return evaluate(stack, seeds, held_back, variants, rows)

    engine.backend.train_epoch, engine.backend.evaluate = spying_train, spying_evaluate
    waiting = canonical_action(op=Op.WAIT).repeat(env.count, 1)
    for _ in range(LENGTH):
        env.step(waiting)
    switch = engine.switch_step[engine.rows.group_index].tolist()
    drifts = [engine.bank.tasks[task].drift is not None for task in engine.rows.task.tolist()]
    switched = {step for step, drifts_here in zip(switch, drifts, strict=True) if drifts_here}
    assert len(switched) > 1
    assert any(step < LENGTH for step in switched)
    for t in range(LENGTH):
        for n, (step, drifts_here) in enumerate(zip(switch, drifts, strict=True)):
            for images in (trained[t][:, :, :, :, n], validated[t][:, :, :, n]):
                if drifts_here:
                    assert bool((images == (1.0 if t < step else -2.0)).all()), (t, n)
                else:
                    assert images.unique().numel() > 10
    of_group = engine.rows.group.tolist()
    for group in range(groups):
        members = [n for n, other in enumerate(of_group) if other == group]
        assert len(members) == GROUP_SIZE + 1  # with the twin
        assert len({switch[n] for n in members}) == 1
        for images in (*trained, *validated):
            part = images[..., members, :]
            assert torch.equal(part, part[..., :1, :].expand_as(part))


def test_the_drift_changes_the_measurements():
    """Before the drift nothing differs from the task without drift."""
    never, always = drifting(never=1.0), drifting(never=0.0, earliest=0.5, latest=0.5)
    traces = []
    for task in (never, always):
        env = growth([task], GROUP_SIZE)
        env.reset(0)
        waiting = canonical_action(op=Op.WAIT).repeat(GROUP_SIZE, 1)
        scores = [env.step(waiting).report for _ in range(LENGTH)]
        traces.append(torch.stack([torch.cat([r.scores.loss, r.twin_scores.loss]) for r in scores]))
    same = (traces[0] - traces[1]).abs() < 1e-9
    assert same.all(1).tolist() == [t < LENGTH // 2 for t in range(LENGTH)]
    assert not bool(same[LENGTH // 2 :].any())
