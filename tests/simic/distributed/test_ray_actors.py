"""Runs with actors on ray: the bits of one process, lag, deaths, refusals and a lost head node."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from pyarrow import parquet

from esper.karn.store import read_events
from esper.leyline.events import PPOUpdateCompleted
from esper.scripts.entry import run_guarded
from esper.scripts.main import esper
from esper.simic.distributed import cluster as cluster_module
from esper.simic.distributed.cluster import INSTALL, ActorsLost, Cluster
from esper.simic.distributed.remote_actors import SILENT_SECONDS, RemoteActors
from esper.simic.run.checkpoint import load_latest
from esper.simic.run.run_process import StopRequest
from esper.simic.training import gym_trainee
from esper.simic.training.growth_trainee import RemoteGrowthTrainee
from esper.simic.training.gym_trainee import RemoteGymTrainee
from esper.simic.training.vectorized import RunSummary, resume_ppo, train_impala
from processes import refusal
from small_runs import SMALL, assert_same, events_of

GROWTH = {**SMALL, "envs": 6, "telemetry_level": "normal", "learning_rate": 1e-2}
GYM = {"gym": "esper/MaskedCartPole-v0", "envs": 5, "rollout_steps": 20, "lstm_hidden": 8}
KINDS = {"growth": GROWTH, "gym": GYM}
ACTORS = 3


@pytest.fixture(scope="module")
def on_ray() -> Iterator[Any]:
    """One cluster for all tests, which the runs join because this process already has."""
    pytest.importorskip("ray", reason=f"ray is not installed: {INSTALL}")
    one = Cluster(None, ACTORS)
    yield one
    one.close()


def run(folder: Path, rounds: int = 3, **settings: Any) -> RunSummary:
    return train_impala(rounds=rounds, telemetry_dir=str(folder), **settings)


def told(path: Path) -> list[dict[str, Any]]:
    """The events of a run without times and speeds."""
    return [
        {k: v for k, v in event.items() if k not in ("time", "path") and "second" not in k}
        for event in events_of(path)
    ]


def assert_same_run(mine: Path, theirs: Path) -> None:
    assert_same(load_latest(mine).parts, load_latest(theirs).parts)
    assert told(mine) == told(theirs)


def lags(path: Path) -> list[float | None]:
    return [event.metrics.get("version_lag") for event in read_events(path, PPOUpdateCompleted)]


def test_a_head_of_ray_that_does_not_answer_is_one_line(tmp_path: Path, capsys) -> None:
    pytest.importorskip("ray", reason=f"ray is not installed: {INSTALL}")
    words = f"--gym CartPole-v1 --actors 1 --ray-address 127.0.0.1:1 --telemetry-dir {tmp_path}"
    printed = refusal(capsys, esper, "train", "impala", *words.split())
    assert printed.startswith("esper: ray_address: nothing answers at 127.0.0.1:1;")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "counts"), [("growth", (1, 2, 3)), ("gym", (2,))])
def test_with_a_lag_of_0_ray_gives_the_bits_of_one_process(
    on_ray: Any, kind: str, counts: tuple[int, ...], tmp_path: Path
) -> None:
    record = {"record": True} if kind == "growth" else {}
    alone = run(tmp_path / "0", **KINDS[kind], **record)
    for actors in counts:
        found = run(tmp_path / str(actors), actors=actors, lag=0, **KINDS[kind], **record)
        assert_same_run(found.path, alone.path)
        assert lags(found.path) == [None] * 3
    if record:
        mine, theirs = (sorted((path / "records").iterdir()) for path in (found.path, alone.path))
        assert len(theirs) == 3
        for one, other in zip(mine, theirs, strict=True):
            assert parquet.read_table(one).equals(parquet.read_table(other))


@pytest.mark.slow
def test_ray_can_be_left_and_joined_when_a_run_is_resumed(on_ray: Any, tmp_path: Path) -> None:
    """Episodes continue over the rounds, and so do they from one number of actors to another."""
    whole = run(tmp_path / "whole", rounds=4, lag=0, **GYM)
    cut = run(tmp_path / "cut", rounds=1, actors=1, lag=0, **GYM)
    resume_ppo(cut.path, {"rounds": 2, "actors": 0})
    resume_ppo(cut.path, {"rounds": 4, "actors": 2})
    assert_same(load_latest(cut.path).parts, load_latest(whole.path).parts)


@pytest.mark.slow
def test_with_a_lag_ray_actors_are_behind_by_at_most_that(on_ray: Any, tmp_path: Path) -> None:
    """With a lag of 1, the default, an actor always has the weights before the last update."""
    behind = run(tmp_path / "one", rounds=5, lag=1, **GROWTH)
    found = run(tmp_path / "default", rounds=5, actors=2, **GROWTH)
    assert lags(found.path) == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert_same(*(load_latest(path).parts["policy"] for path in (found.path, behind.path)))
    loose = lags(run(tmp_path / "loose", rounds=5, actors=2, lag=3, **GROWTH).path)
    assert all(lag is not None and 0.0 <= lag <= 3.0 for lag in loose)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ray_starts_a_killed_actor_again_and_nothing_is_lost(
    on_ray: Any, kind: str, tmp_path: Path, monkeypatch, capfd
) -> None:
    alone = run(tmp_path / "alone", **KINDS[kind])
    give, killed = RemoteActors._dispatch, []

    def kill_during(self: RemoteActors, actor: Any, version: int, weights: Any) -> None:
        begun = actor.next
        give(self, actor, version, weights)
        if begun == 2 and actor.next == 3 and actor is self._actors[1]:
            killed.append(actor.process.number)
            os.kill(actor.process.number, signal.SIGKILL)

    monkeypatch.setattr(RemoteActors, "_dispatch", kill_during)
    found = run(tmp_path / "killed", actors=2, lag=0, **KINDS[kind])
    assert len(killed) == 1
    assert_same_run(found.path, alone.path)
    lines = [line for line in capfd.readouterr().err.splitlines() if "lost" in line]
    assert len(lines) == 1
    assert f"actor 2 of 2 was lost (process {killed[0]} on" in lines[0]
    assert "rollout 2 was collected again" in lines[0]


@pytest.mark.slow
def test_a_ray_actor_that_always_dies_ends_the_run(
    on_ray: Any, tmp_path: Path, monkeypatch, capfd
) -> None:
    """The plugin ends its process in the second episode of a task, every time."""
    plugin = tmp_path / "deadly.py"
    plugin.write_text(
        "import gymnasium, os, signal\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Deadly(CartPoleEnv):\n"
        "    def reset(self, **more):\n"
        "        self.begun = getattr(self, 'begun', 0) + 1\n"
        "        if self.begun == 2:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().reset(**more)\n"
        "gymnasium.register('Deadly-v0', Deadly)\n"
    )
    settings = {**GYM, "gym": "Deadly-v0", "plugin": [str(plugin)], "rollout_steps": 8}
    found = run(tmp_path, rounds=20, actors=1, lag=0, **settings)
    assert (found.status, found.exit_code) == ("failed", 1)
    assert load_latest(found.path).round == len(found.rounds) >= 1
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("esper:")]
    assert "actor 1 of 1 was lost 4 times in rollout" in line
    assert "--resume continues its checkpoint" in line


@pytest.mark.slow
def test_a_lost_head_of_ray_ends_the_run_with_a_checkpoint(
    on_ray: Any, tmp_path: Path, monkeypatch, capfd
) -> None:
    class Round:
        started = stepped = staticmethod(lambda *any: None)

        @staticmethod
        def round_done(summary: Any) -> None:
            monkeypatch.setattr(cluster_module, "HEAD_SECONDS", 0.0)
            monkeypatch.setattr(cluster_module, "reachable", lambda *any, seconds: False)
            # What actors do can no longer be seen.
            monkeypatch.setattr(on_ray.ray, "wait", lambda calls, **more: ([], calls))

    settings = {**GROWTH, "telemetry_dir": str(tmp_path), "actors": 1, "rounds": 50}
    found = train_impala(observer=Round(), **settings)  # type: ignore[arg-type]
    assert (found.status, found.exit_code, len(found.rounds)) == ("failed", 1, 1)
    assert load_latest(found.path).round == 1
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("esper:")]
    assert "has been unreachable for" in line


@pytest.mark.slow
def test_a_head_of_ray_that_is_lost_at_the_start_is_one_line(
    on_ray: Any, tmp_path: Path, monkeypatch, capfd
) -> None:
    monkeypatch.setattr(sys.modules[RemoteActors.__module__], "START_SECONDS", 0.0)
    monkeypatch.setattr(cluster_module, "HEAD_SECONDS", 0.0)
    monkeypatch.setattr(cluster_module, "reachable", lambda *any, seconds: False)
    words = f"--gym CartPole-v1 --actors 1 --telemetry-dir {tmp_path}"
    assert run_guarded(esper, ["train", "impala", *words.split()]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("esper: actors: the head node, ")
    assert "has been unreachable for" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_mistake_that_a_ray_actor_meets_is_one_line(on_ray: Any, tmp_path: Path, capfd) -> None:
    plugin = tmp_path / "masks.py"
    plugin.write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Masked(CartPoleEnv):\n"
        "    def reset(self, **more):\n"
        "        return super().reset(**more)[0], {'action_mask': [0, 0]}\n"
        "gymnasium.register('NoOption-v0', Masked)\n"
    )
    words = f"--gym NoOption-v0 --plugin {plugin} --actors 1 --lag 0 --telemetry-dir {tmp_path}"
    assert run_guarded(esper, ["train", "impala", *words.split()]) == 2
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("esper:")]
    assert line.startswith("esper: gym: action_mask of environment 0 ")
    assert "Traceback" not in line


@pytest.mark.slow
def test_more_ray_actors_than_cpus_are_refused_in_time(
    on_ray: Any, tmp_path: Path, monkeypatch, capfd
) -> None:
    module = sys.modules[RemoteActors.__module__]
    monkeypatch.setattr(module, "START_SECONDS", 3.0)
    words = f"--gym CartPole-v1 --actors 5 --telemetry-dir {tmp_path}"
    assert run_guarded(esper, ["train", "impala", *words.split()]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "of 5 started within 3 s; each takes a CPU, and the cluster has 3" in line
    assert list(tmp_path.iterdir()) == []


def test_an_actor_that_answers_nothing_is_given_up_after_a_while(monkeypatch) -> None:
    """With stand-ins for ray and its cluster."""
    process = MagicMock()
    actor = SimpleNamespace(pending_ping=None, handle=SimpleNamespace(process=process))
    actors = object.__new__(RemoteActors)
    actors.cluster = MagicMock()
    actors.ray = SimpleNamespace(wait=lambda pings, timeout: ([], pings))
    actors._actors = [actor]  # type: ignore[list-item]
    actors._check_alive(actors._actors)
    process.options.return_value.remote.assert_called_once()
    late = time.monotonic() + SILENT_SECONDS + 1.0
    monkeypatch.setattr(time, "monotonic", lambda: late)
    with pytest.raises(ActorsLost, match="actor 1 of 1 has answered nothing"):
        actors._check_alive(actors._actors)
    actors.ray.wait = lambda pings, timeout: (pings, [])
    actors._check_alive(actors._actors)
    assert actor.pending_ping[1] == late


def test_waiting_for_a_rollout_can_be_interrupted() -> None:
    """With stand-ins for ray, its cluster and an actor that never delivers."""
    actors = object.__new__(RemoteActors)
    waiting = SimpleNamespace(deliveries=[], call="call", next=5)
    actors._actors = [waiting]  # type: ignore[list-item]
    actors.cluster, actors.last, actors.lag = MagicMock(), 3, 0
    actors.ray = MagicMock()
    actors.ray.wait.side_effect = [([], ["call"])] * 3
    actors._dispatch = MagicMock()  # type: ignore[method-assign]
    actors._check_alive = MagicMock()  # type: ignore[method-assign]
    actors._check = MagicMock(side_effect=[None, StopRequest()])
    with pytest.raises(StopRequest):
        actors.collect(4, {})
    assert actors._dispatch.call_args.args[:2] == (waiting, 3)
    assert actors._check_alive.call_count == 1
    assert actors.ray.wait.call_args.kwargs["num_returns"] == 1


@pytest.mark.parametrize("kind", [RemoteGymTrainee, RemoteGrowthTrainee])
def test_a_trainee_that_is_closed_closes_its_actors(kind: Any) -> None:
    trainee = object.__new__(kind)
    trainee.actors = MagicMock()
    trainee.close()
    trainee.actors.close.assert_called_once_with()


def test_environments_are_restored_only_by_a_process_that_did_not_leave_them(monkeypatch) -> None:
    """With stand-ins for all that a round of such a process does."""
    names = "load_snapshot", "begin", "collect", "state_of"
    calls = {name: MagicMock() for name in names}
    for name, call in calls.items():
        monkeypatch.setattr(gym_trainee, name, call)
    shard = object.__new__(gym_trainee.GymShard)
    shard.config, shard.environments, shard.actor = MagicMock(), MagicMock(), MagicMock()
    shard.number = None
    begins = []
    for number in (3, 4, 5, 7, 8, 8):
        shard.collect(number, {}, "before")
        begins.append(calls["begin"].call_count)
    assert begins == [1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("found", [None, ModuleType("ray")])
def test_without_ray_the_command_says_how_to_install_it(
    found: ModuleType | None, tmp_path: Path, monkeypatch, capsys
) -> None:
    """A folder with its name is a module too, without a file."""
    monkeypatch.setitem(sys.modules, "ray", found)
    words = f"--gym CartPole-v1 --actors 1 --telemetry-dir {tmp_path}"
    printed = refusal(capsys, esper, "train", "impala", *words.split())
    assert printed == f"esper: actors: ray is not installed: {INSTALL}\n"
    assert list(tmp_path.iterdir()) == []
