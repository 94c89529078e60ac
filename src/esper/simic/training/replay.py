"""Files that record refused updates, so that the updates can be replayed."""

import io
import pickle
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from esper.kasmina.transfer import CPU
from esper.leyline.config import TrainConfig, unflatten
from esper.leyline.disk import replace_synced
from esper.leyline.errors import UsageError, first_line
from esper.simic.growth.agent import growth_agent
from esper.simic.gym.agent import gym_agent
from esper.simic.gym.lockstep import Shape
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.features import FeatureNames, Observation
from esper.tamiyo.policy.recurrent import FlatObservation

SCHEMA_VERSION = 4


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of replaying a refused update.

    Attributes:
        round: number of the round whose update was refused.
        run_tensor: name of the first tensor that was not finite in the run.
        replay_tensor: the same of the replay, None if all are finite there.
    """

    round: int
    run_tensor: str
    replay_tensor: str | None


def write_refusal(
    run: Path, round_number: int, agent: PPOAgent[Any], settings: dict[str, Any]
) -> Path:
    """Write a refused update atomically to a file under ``run/refused/``; return its path.

    Args:
        run: the run directory.
        round_number: the round whose update was refused.
        agent: an agent whose last update was refused.
        settings: flat settings of the run.

    Raises:
        OSError: the file cannot be written.
    """
    assert agent.refusal is not None, "nothing was refused"
    folder = run / "refused"
    folder.mkdir(exist_ok=True)
    path = folder / f"round-{round_number:06d}.pt"
    amp_dtype = agent.policy.amp_dtype
    content = {
        "schema": SCHEMA_VERSION,
        "round": round_number,
        "tensor": agent.refusal.tensor,
        "settings": settings,
        "shape": agent.shape,
        "features": agent.policy.features and asdict(agent.policy.features),
        "amp_dtype": None if amp_dtype is None else str(amp_dtype).removeprefix("torch."),
        "agent": agent.refusal.agent,
        "rollout": agent.refusal.rollout,
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    replace_synced(path, buffer.getvalue())
    return path


def replay(path: Path) -> ReplayResult:
    """Replay a refused update on the CPU.

    Raises:
        UsageError: ``path`` is not a file of a refused update, or another version wrote it.
    """
    try:
        with warnings.catch_warnings():
            # Torch warns of files that it then refuses.
            warnings.simplefilter("ignore")
            content = torch.load(path, weights_only=True, map_location="cpu")
        if content["schema"] != SCHEMA_VERSION:
            raise UsageError(f"file: another version of Esper wrote {path}; use that version")
        config = unflatten(content["settings"])
        dtype = content["amp_dtype"]
        amp_dtype = None if dtype is None else getattr(torch, dtype)
        names = content.get("features")
        features = None if names is None else FeatureNames(**names)
        agent, observation_type = _learner(config, content["shape"], amp_dtype, features)
        agent.load_state(content["agent"])
        agent.update(Rollout.from_state(observation_type, content["rollout"]))
        tensor = agent.refusal.tensor if agent.refusal else None
        return ReplayResult(content["round"], content["tensor"], tensor)
    except UsageError:
        raise
    except Exception as error:
        # Torch's message advises to load the file so that it would be executed.
        crafted = isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error)
        reason = "it holds more than tensors" if crafted else first_line(error)
        raise UsageError(
            f"file: {path} is not the file of a refused update ({reason}); give one of RUN/refused/"
        ) from error


def _learner(
    config: TrainConfig,
    shape: dict[str, Any],
    amp_dtype: torch.dtype | None,
    features: FeatureNames | None,
) -> tuple[PPOAgent[Any], type]:
    """A new learner with the settings of its run, and the class of its observations."""
    if config.gymnasium.gym is not None:
        return gym_agent(config, Shape(**shape), CPU, amp_dtype), FlatObservation
    agent = growth_agent(
        config.learner,
        config.world.seed,
        CPU,
        amp_dtype,
        learner_arguments=config.algorithm.learner_arguments(config.learner),
        baseline_group=config.baseline_group,
        features=features,
    )
    return agent, Observation
