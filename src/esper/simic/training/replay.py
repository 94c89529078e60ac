"""Files that show an update again that met a number that is not finite."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from esper.leyline.config import TrainConfig, unflatten
from esper.leyline.errors import UsageError
from esper.simic.growth.agent import growth_agent
from esper.simic.gym.agent import Shape, gym_agent
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.policy.recurrent import FlatObservation

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True)
class Replayed:
    """What an update did when it was done again.

    Attributes:
        round: of the run.
        recorded: first tensor that was not finite then.
        found: that of today, None where the update met none.
    """

    round: int
    recorded: str
    found: str | None


def write_refusal(
    run: Path, round_number: int, agent: PPOAgent[Any], settings: dict[str, Any]
) -> Path:
    """Keep an agent's refusal under ``run/refused/``; whole or not at all.

    Args:
        run: its directory.
        round_number: the round that was refused.
        agent: has a refusal.
        settings: of the run, flat.
    """
    assert agent.refusal is not None, "nothing was refused"
    folder = run / "refused"
    folder.mkdir(exist_ok=True)
    path = folder / f"round-{round_number:06d}.pt"
    draft = path.with_suffix(".draft")
    amp_dtype = agent.policy.amp_dtype
    content = {
        "schema": SCHEMA_VERSION,
        "round": round_number,
        "tensor": agent.refusal.tensor,
        "settings": settings,
        "shape": agent.shape,
        "amp_dtype": None if amp_dtype is None else str(amp_dtype).removeprefix("torch."),
        "agent": agent.refusal.agent,
        "rollout": agent.refusal.rollout,
    }
    torch.save(content, draft)
    os.replace(draft, path)
    return path


def replay(path: Path) -> Replayed:
    """Do a refused update again, on the CPU.

    Raises:
        UsageError: ``path`` is no such file, or of another version.
    """
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
        if content["schema"] != SCHEMA_VERSION:
            raise UsageError(f"file: {path} is of another version of Esper")
        config = unflatten(content["settings"])
        dtype = content["amp_dtype"]
        amp_dtype = None if dtype is None else getattr(torch, dtype)
        agent, seen = _learner(config, content["shape"], amp_dtype)
        agent.load_state(content["agent"])
        agent.update(Rollout.from_state(seen, content["rollout"]))
        found = agent.refusal.tensor if agent.refusal else None
        return Replayed(content["round"], content["tensor"], found)
    except UsageError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"file: {path} is no file of a refused update ({reason}); they lie under RUN/refused/"
        ) from error


def _learner(
    config: TrainConfig, shape: dict[str, Any], amp_dtype: torch.dtype | None
) -> tuple[PPOAgent[Any], type]:
    """A learner as it was when its run began, and what it sees."""
    cpu = torch.device("cpu")
    if config.gymnasium.gym is not None:
        return gym_agent(config, Shape(**shape), cpu, amp_dtype), FlatObservation
    return growth_agent(config.learner, config.world.seed, cpu, amp_dtype), Observation
