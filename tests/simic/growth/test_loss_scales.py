"""Loss scales belong to their environment across episodes, shards, tasks and checkpoints."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper.leyline.errors import UsageError
from esper.runtime.tasks import Task
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.shard import TWIN_STREAM
from esper.simic.growth.step import Step
from esper.tamiyo.random_actor import RandomActor
from esper.tolaria.precision import START, Precision
from support import small_environments, small_host, small_mlp, small_task

ENVS, GROUP_SIZE, LENGTH = 12, 2, 4
TWINS = ENVS // GROUP_SIZE
HOSTS = {"three": small_host(), "two": small_host(pools=0), "mlp": small_mlp()}
TASKS = [replace(small_task(host), name=name) for name, host in HOSTS.items()]
F16 = torch.float16


def growth(
    tasks: list[Task] = TASKS, dtype: torch.dtype | None = F16, envs: int = ENVS, threads: int = 1
) -> GrowthEnv:
    settings = {"seed": 7, "episode_length": LENGTH, "backend": "torch", "threads": threads}
    return small_environments(
        tasks, envs, Precision("cpu", dtype), group_size=GROUP_SIZE, **settings
    )


def play(env: GrowthEnv, episode: int) -> Tensor:
    """Training losses of an episode of random growth, ``[T, N]``."""
    losses: list[Tensor] = []

    def on_step(t: int, actions: Tensor, step: Step) -> None:
        losses.append(step.report.train_loss)

    collect(env, RandomActor(3), episode, on_step)
    return torch.stack(losses)


def test_every_row_of_a_shard_uses_the_scale_of_its_environment() -> None:
    env = growth(threads=2)
    assert env.scales is not None
    own = 2.0 ** (torch.arange(ENVS + TWINS) / 2)
    env.load_state(env.state() | {"scale": own})
    dealt = set()
    for episode in range(6):
        env.reset(episode)
        dealt.add(tuple(env.task_of.tolist()))
        seen = []
        for shard in env.shards:
            scales, who = shard.engine.scales, shard.engine.rows.environment
            assert scales is not None
            twins = ENVS + who - TWIN_STREAM
            place = torch.where(who < ENVS, who, twins)
            assert torch.equal(scales.scale, own[place])
            seen += place.tolist()
        assert sorted(seen) == list(range(ENVS + TWINS))
    assert len(dealt) > 1, "the tasks should have changed"


def test_scales_are_kept_across_episodes() -> None:
    env = growth()
    play(env, 0)
    play(env, 1)
    state = env.state()
    assert state["clean"].tolist() == [2 * LENGTH] * (ENVS + TWINS)
    assert state["scale"].tolist() == [START] * (ENVS + TWINS)


def high(env: GrowthEnv) -> GrowthEnv:
    """An environment with scales at which the first minibatches overflow."""
    env.load_state(env.state() | {"scale": torch.full((ENVS + TWINS,), 2.0**40)})
    return env


def test_a_restored_environment_continues_in_the_same_bits() -> None:
    env, fresh, restored = high(growth()), growth(), growth()
    play(env, 0)
    state = env.state()
    assert (state["skipped"] > 0).all()
    amp = env.amp
    assert amp.skipped == int(state["skipped"][:ENVS].sum())
    assert amp.least_scale == state["scale"][:ENVS].min()
    assert amp.mean_scale == pytest.approx(float(state["scale"][:ENVS].mean()))
    restored.load_state(state)
    expected = play(env, 1)
    assert torch.equal(play(restored, 1), expected)
    for name, part in env.state().items():
        assert torch.equal(restored.state()[name], part)
    assert not torch.equal(play(high(fresh), 1), expected), "otherwise scales make no difference"


def test_an_episode_that_is_cut_short_does_not_change_the_scales() -> None:
    env = high(growth())
    play(env, 0)
    before = env.state()
    env.reset(1)
    env.step(torch.zeros(ENVS, 8, dtype=torch.long))
    assert env.scales is not None
    assert not torch.equal(env.scales.clean, before["clean"])
    for _ in range(2):
        for name, part in env.state().items():
            assert torch.equal(part, before[name])
        env.reset(1)
    assert torch.equal(env.scales.clean, before["clean"])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_without_loss_scales_the_state_is_empty(dtype: torch.dtype | None) -> None:
    env = growth(dtype=dtype)
    env.load_state(growth().state())
    assert env.state() == {}
    assert env.amp.enabled == (dtype is not None)
    assert env.amp.dtype == (None if dtype is None else "bfloat16")
    assert (env.amp.mean_scale, env.amp.least_scale, env.amp.skipped) == (None, None, None)


def test_float16_resumes_from_a_checkpoint_without_scales() -> None:
    env = growth()
    env.load_state({})
    assert env.state()["scale"].tolist() == [START] * (ENVS + TWINS)
    assert (env.amp.dtype, env.amp.skipped) == ("float16", 0)


def test_a_checkpoint_of_other_environments_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^resume: .* 6 environments and twins, this run has 18"):
        growth().load_state(growth(envs=4).state())
