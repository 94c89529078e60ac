"""Growth and learning on a CUDA device. One command runs these tests: python3 -m pytest -m gpu

They need torch, numpy, scikit-learn and pyarrow, and the wheels of msgspec, gymnasium and
farama-notifications. The same tests run on a virtual device (``virtual_device``) with the slow
tests, so that their first run on a GPU is not lost to a mistake in them.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.karn.store import read_events
from esper.kasmina.hosts.cnn import CnnHost
from esper.leyline.config import LearnerConfig, unflatten
from esper.leyline.config.offline import OfflineConfig
from esper.leyline.events import AnalyticsSnapshot, PPOUpdateCompleted
from esper.runtime import data
from esper.runtime.tasks import Task, find
from esper.simic.graphs import CapturedAgent
from esper.simic.growth.agent import growth_agent
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.simic.offline.offline_run import learn_offline
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import Rollout
from esper.simic.training.vectorized import resume_ppo, run_training, train_ppo_vectorized
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.random_actor import RandomActor
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.bank import DataBank
from esper.tolaria.engine import Engine, Rows
from esper.tolaria.precision import Precision
from support import Garden, Plant, seed_state
from synthetic import synthetic_rollout

GPU = torch.device("cuda:0")
SUBJECT = 1


def played(device: str) -> tuple[Tensor, Tensor]:
    """Actions and rewards of random growth in fp64, which must not depend on the device."""
    host = CnnHost(channels=(3, 5), classes=10, image=(8, 8, 1), pools=1)
    task = Task("tiny", "", host, lambda: data.digits(shift=1, noise=0.1))
    config = GrowthConfig(
        seed=3, episode_length=12, max_batches=2, batch_size=8, dtype=torch.float64, backend="torch"
    )
    where = torch.device(device)
    env = GrowthEnv([task], torch.arange(16), config, Precision(where.type), where)
    rollout = collect(env, RandomActor(3), 0)
    return rollout.actions.cpu(), rollout.rewards.cpu()


def test_growth_on_cuda_is_growth_on_the_cpu(cuda: str) -> None:
    (actions, rewards), (cuda_actions, cuda_rewards) = played("cpu"), played("cuda:0")
    assert torch.equal(actions, cuda_actions)
    torch.testing.assert_close(rewards, cuda_rewards, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [{}, {"amp_dtype": "float16"}, {"amp": False, "tf32": False, "compile": "off"}],
    ids=str,
)
def test_a_policy_learns_from_records_on_cuda_what_it_learns_on_the_cpu(
    cuda: str, tmp_path: Path, settings: dict
) -> None:
    given = {"envs": 8, "group_size": 2, "episode_length": 8, "max_batches": 1, "batch_size": 8}
    place = {"telemetry_dir": str(tmp_path), "record": True, "rounds": 2}
    records = str(run_training(unflatten(given | place), "random").path)
    own = {"records": (records,), "epochs": 4, "telemetry_dir": str(tmp_path)}
    cpu = learn_offline(OfflineConfig(**own))
    cuda = learn_offline(OfflineConfig(**own, device="cuda:0", **settings))
    for one, other in zip(cpu.epochs, cuda.epochs, strict=True):
        assert other.metrics["refused"] == 0.0
        for name in ("policy_loss", "held_out_policy_loss", "value_loss"):
            assert other.metrics[name] == pytest.approx(one.metrics[name], rel=0.05), name


@pytest.mark.parametrize("use_amp", [False, True])
def test_a_run_on_cuda_learns_from_its_own_ratio_and_resumes(
    cuda: str, tmp_path: Path, use_amp: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {
        "device": "cuda:0", "envs": 8, "episode_length": 8, "max_batches": 2, "batch_size": 16,
        "rounds": 2, "telemetry_dir": str(tmp_path), "use_amp": use_amp,
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, "esper"):
        run = train_ppo_vectorized(unflatten(settings)).path
        resume_ppo(run, {"rounds": 3})
    assert caplog.records == []  # compilation and capture would have warned
    updates = list(read_events(run, PPOUpdateCompleted))
    assert [u.round for u in updates] == [1, 2, 3]
    for update in updates:
        assert update.metrics["first_ratio_max"] == pytest.approx(1.0, abs=1e-3)
        norms = [v for name, v in update.metrics.items() if name.startswith("head_grad_norms/")]
        assert len(norms) == 9
        assert all(isinstance(norm, float | int) for norm in norms)
    assert {s.amp_enabled for s in read_events(run, AnalyticsSnapshot)} == {use_amp}


def learner(capture: bool, mode: str = "off", dtype: torch.dtype | None = None) -> PPOAgent[Any]:
    """A learner whose minibatches are captured or not; ``mode`` is that of compilation."""
    config = LearnerConfig(lstm_hidden=16, ppo_epochs=4, minibatches=2, target_kl=100.0)
    agent = growth_agent(config, 0, GPU, dtype, "default" if capture else mode)
    if capture:
        assert isinstance(agent, CapturedAgent)
        agent.compiled.active = mode != "off"
    return agent


def learned(agent: PPOAgent[Any]) -> list[dict[str, float | None]]:
    """Metrics of updates from rollouts that do not depend on the agent."""
    author = growth_agent(LearnerConfig(lstm_hidden=16), 0, torch.device("cpu"))
    return [
        agent.update(on_gpu(synthetic_rollout(author, 5, 8, 2, seed=i, episode=i)))
        for i in range(3)
    ]


def on_gpu(rollout: Rollout[Observation]) -> Rollout[Observation]:
    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: moved(part) for name, part in value.items()}
        return value.to(GPU) if isinstance(value, Tensor) else value

    return Rollout.from_state(Observation, moved(rollout.state()))


HALVES = pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)


@HALVES
def test_captured_updates_are_eager_updates_bit_for_bit(
    cuda: str, dtype: torch.dtype | None
) -> None:
    eager, captured = learner(False, dtype=dtype), learner(True, dtype=dtype)
    assert learned(eager) == learned(captured)
    for mine, theirs in zip(eager.policy.parameters(), captured.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert isinstance(captured, CapturedAgent)
    assert_replayed(captured)


def assert_replayed(agent: CapturedAgent[Any]) -> None:
    """The update was recorded and replayed, and nothing fell back to eager calls."""
    step = agent._captured_step
    assert not step.failure
    assert [recording.replay is not None for recording in step.recordings.values()] == [True]
    assert [recording.calls for recording in step.recordings.values()] == [3 * 4 * 2]


def test_compilation_survives_and_its_updates_are_captured(cuda: str) -> None:
    eager, compiled = learner(False), learner(True, mode="default")
    plain, found = learned(eager), learned(compiled)
    assert compiled.compiled.active
    assert isinstance(compiled, CapturedAgent)
    assert_replayed(compiled)
    for name in ("policy_loss", "value_loss", "entropy", "grad_norm"):
        assert found[0][name] == pytest.approx(plain[0][name], rel=2e-2, abs=1e-4), name


@HALVES
@pytest.mark.parametrize("count", [64, 1024])
def test_nan_in_one_row_stays_there(cuda: str, count: int, dtype: torch.dtype | None) -> None:
    """In one call for all rows, a NaN of a row must not reach another: not even by zero weight."""
    if cuda == "virtual" and count > 64:
        pytest.skip("takes minutes on a CPU")
    task = find("digits_shift")
    rows = torch.arange(count).to(GPU)
    garden: Garden = [{0: Plant("conv_heavy", alpha=0.5), 1: Plant("norm", alpha=0.5)}] * count
    state = seed_state(garden, len(task.host.slots)).map(lambda x: x.to(GPU))
    bank = DataBank([(task, task.datasets())], torch.float32, GPU)
    found = []
    for poison in (1.0, float("nan")):
        backend = TorchBackend(task.host, Precision("cuda", dtype))
        engine = Engine(bank, Rows(rows, rows // 8), 0, backend, max_batches=1, batch_size=4)
        engine.reset(0)
        engine.germinate(state.living, state.blueprint, step=0)
        engine.stack.host[SUBJECT] *= poison
        engine.train(state, 0)
        found.append((engine.stack.host.cpu(), engine.measure(state, 0, False).scores.loss.cpu()))
    (weights, losses), (poisoned, poisoned_losses) = found
    others = torch.arange(count) != SUBJECT
    assert poisoned[SUBJECT].isnan().all()
    assert poisoned_losses.isfinite().tolist() == others.tolist()
    assert torch.equal(poisoned[others], weights[others])
    assert torch.equal(poisoned_losses[others], losses[others])
