"""A CUDA device gives the same numbers. One command runs these tests: make test-gpu."""

from pathlib import Path

import pytest
import torch

from esper.karn.store import read_events
from esper.kasmina.hosts.cnn import CnnHost
from esper.leyline.config import unflatten
from esper.leyline.config.offline import OfflineConfig
from esper.leyline.events import AnalyticsSnapshot, PPOUpdateCompleted
from esper.runtime import data
from esper.runtime.tasks import Task
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.simic.offline.offline_run import learn_offline
from esper.simic.training.vectorized import resume_ppo, run_training, train_ppo_vectorized
from esper.tamiyo.baselines import RandomActor
from esper.tolaria.precision import Precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def played(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions and rewards of random growth in fp64, which must not depend on the device."""
    host = CnnHost(channels=(3, 5), classes=10, image=(8, 8, 1), pools=1)
    task = Task("tiny", "", host, lambda: data.digits(shift=1, noise=0.1))
    config = GrowthConfig(
        seed=3, episode_length=12, max_batches=2, batch_size=8, dtype=torch.float64
    )
    where = torch.device(device)
    env = GrowthEnv([task], torch.arange(16), config, Precision(where.type), where)
    rollout = collect(env, RandomActor(3), 0)
    return rollout.actions.cpu(), rollout.rewards.cpu()


def test_growth_on_cuda_is_growth_on_the_cpu() -> None:
    (actions, rewards), (cuda_actions, cuda_rewards) = played("cpu"), played("cuda:0")
    assert torch.equal(actions, cuda_actions)
    torch.testing.assert_close(rewards, cuda_rewards, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [{}, {"amp_dtype": "float16"}, {"amp": False, "tf32": False, "compile": "off"}],
    ids=str,
)
def test_a_policy_learns_from_records_on_cuda_what_it_learns_on_the_cpu(
    tmp_path: Path, settings: dict
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
def test_a_run_on_cuda_learns_from_its_own_ratio_and_resumes(tmp_path: Path, use_amp: bool) -> None:
    settings = {
        "device": "cuda:0", "envs": 8, "episode_length": 8, "max_batches": 2, "batch_size": 16,
        "rounds": 2, "telemetry_dir": str(tmp_path), "use_amp": use_amp,
    }  # fmt: skip
    run = train_ppo_vectorized(unflatten(settings)).path
    resume_ppo(run, {"rounds": 3})
    updates = list(read_events(run, PPOUpdateCompleted))
    assert [u.round for u in updates] == [1, 2, 3]
    for update in updates:
        assert update.metrics["first_ratio_max"] == pytest.approx(1.0, abs=1e-3)
        norms = [v for name, v in update.metrics.items() if name.startswith("head_grad_norms/")]
        assert len(norms) == 9
        assert all(isinstance(norm, float | int) for norm in norms)
    assert {s.amp_enabled for s in read_events(run, AnalyticsSnapshot)} == {use_amp}
