"""Shards as an actor builds them, in this process: from plain data, with the bits of one run."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.leyline.config import unflatten
from esper.nissa.hub import Hub
from esper.runtime import plugins
from esper.runtime.gate import Permission
from esper.simic.distributed.remote_actors import ShardProcess
from esper.simic.distributed.wire import as_arrays, as_tensors
from esper.simic.impala import snapshot
from esper.simic.training.actor_specs import actor_specs, data_from_files, joined_rollout
from esper.simic.training.growth_trainee import GrowthShard, GrowthTrainee
from esper.simic.training.setup import resolve_tasks
from esper.simic.training.vectorized import train_impala
from esper.tamiyo.policy.features import Observation
from small_runs import SMALL
from synthetic import CPU

PLUGIN = """
from dataclasses import replace
from pathlib import Path
from esper.runtime.tasks import TASKS, find

made = replace(find("digits"), name="pieces", data=lambda: _read())
def _read():
    assert Path({path!r}).exists(), "the file of the learner"
    return find("digits").data()
TASKS["pieces"] = lambda: made
"""


def collected(config: Any, cuts: list[int], rounds: int = 2) -> list[dict[str, Any]]:
    """The rollouts of shards that were built from specifications that travelled as bytes."""
    tasks = resolve_tasks(config)
    sent = pickle.dumps((actor_specs(config, cuts, True), data_from_files(config, tasks)))
    specs, data = pickle.loads(sent)
    processes = [ShardProcess(GrowthShard, spec, data) for spec in specs]
    weights = as_arrays(snapshot(GrowthTrainee(config, "impala", (CPU,)).agent))  # type: ignore[arg-type]
    found = []
    for number in range(1, rounds + 1):
        deliveries = [one.collect(number, number - 1, weights, None) for one in processes]
        states = [as_tensors(delivery.rollout)["rollout"] for delivery in deliveries]
        found.append(joined_rollout(Observation, states, CPU).state())
    return found


def in_one_process(config: Any, rounds: int = 2) -> list[dict[str, Any]]:
    trainee = GrowthTrainee(config, "impala", (CPU,))
    hub = Hub([], "off")
    found = [trainee.collect(hub, n, lambda step: None).state() for n in range(1, rounds + 1)]
    hub.close()
    return found


def assert_equal(mine: Any, theirs: Any, name: str = "") -> None:
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert_equal(mine[key], theirs[key], f"{name}/{key}")
    elif isinstance(mine, torch.Tensor):
        assert mine.dtype == theirs.dtype, name
        assert torch.equal(mine, theirs), name
    else:
        assert mine == theirs, name


@pytest.mark.parametrize("cuts", [[10], [4, 6], [2, 4, 4]])
@pytest.mark.parametrize("more", [{}, {"amp_policy": True}])
def test_shards_collect_the_bits_of_one_process(cuts: list[int], more: dict) -> None:
    """The tasks have hosts of two and of three slots, so some shards see fewer than others."""
    settings = {**SMALL, "envs": 10, "task": ["digits_deep", "digits_shift", "digits_mlp"]}
    config = unflatten({**settings, "algorithm": "impala", "lag": 0, **more})
    for mine, theirs in zip(collected(config, cuts), in_one_process(config), strict=True):
        assert_equal(mine, theirs)


def test_noise_is_as_wide_as_the_widest_host_of_the_round_needs() -> None:
    """Its draws are keyed by its width, so a shard of narrow hosts must draw as all do."""
    config = unflatten(
        {**SMALL, "envs": 6, "task": ["digits_deep", "digits_shift"], "algorithm": "impala"}
    )
    weights = snapshot(GrowthTrainee(config, "impala", (CPU,)).agent)  # type: ignore[arg-type]
    for spec in actor_specs(config, [2, 2, 2], True):
        shard = GrowthShard(spec, {})
        shard.collect(1, weights, None)
        assert shard.actor.least_options == 3
    narrow, wide = shard.actor, GrowthShard(spec, {}).actor
    narrow.least_options, wide.least_options = 0, 40
    observation = shard.environment.reset(1)
    noise = []
    for actor in (narrow, wide):
        actor.begin(shard.environment.environments, 1)
        noise.append(actor._draw_noise(observation, 0))
    assert noise[0].shape[-1] < noise[1].shape[-1] == 40


@pytest.mark.parametrize("source", ["plugin", "text_file", "initial_policy"])
def test_a_shard_needs_no_file_of_the_learner(
    source: str, tmp_path: Path, scratch_register: None
) -> None:
    there = tmp_path / "there"
    there.write_bytes(bytes(range(32, 127)) * 200)
    more: dict[str, Any]
    if source == "plugin":
        plugin = tmp_path / "plugin.py"
        plugin.write_text(PLUGIN.format(path=str(there)))
        more = {"plugin": [str(plugin)], "task": "pieces"}
    elif source == "text_file":
        more = {"text_file": str(there), "task": "text_bytes"}
    else:
        before = train_impala(**SMALL, rounds=1, telemetry_dir=str(tmp_path))
        more = {"initial_policy": str(before.path)}
    config = unflatten({**SMALL, "envs": 4, "algorithm": "impala", "lag": 0, **more})
    plugins.load_all(config, Permission(config.world.plugin), "test")
    tasks = resolve_tasks(config)
    expected = in_one_process(config, 1)
    weights = as_arrays(snapshot(GrowthTrainee(config, "impala", (CPU,)).agent))  # type: ignore[arg-type]
    sent = pickle.dumps((actor_specs(config, [2, 2], True), data_from_files(config, tasks)))
    assert str(tmp_path).encode() not in sent.replace(PLUGIN.format(path=str(there)).encode(), b"")
    shutil.rmtree(tmp_path)
    specs, data = pickle.loads(sent)
    assert list(data) == ([] if source == "initial_policy" else [tasks[0].name])
    deliveries = [
        ShardProcess(GrowthShard, spec, data).collect(1, 0, weights, None) for spec in specs
    ]
    states = [as_tensors(delivery.rollout)["rollout"] for delivery in deliveries]
    assert_equal(joined_rollout(Observation, states, CPU).state(), expected[0])
