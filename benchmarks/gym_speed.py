"""How fast is the recurrent engine? Times it against sb3-contrib, in turns in one process.

    python benchmarks/gym_speed.py --write

An observation of 128 numbers, an LSTM of 512 that actor and critic share, eight heads of 3, 8, 4,
3, 3, 4, 4 and 6 options, 150 steps of 16 environments, one epoch of the full batch, one thread. The
environment does nothing, so that a rollout measures inference and bookkeeping; its episodes have
150 steps, and an update learns from 16 complete ones. Between LSTM and heads, each network has its
own hidden layers of 64; Esper's also has an encoder of 64 before the LSTM. Reports medians of wall
and of CPU time; on a busy machine, CPU time is the more reliable of the two.
"""

import os
from importlib.metadata import version
from typing import Any

import torch
from gym_engine import CPU, ENVS, INPUTS, MEMORY, OPTIONS, STEPS, Idle, Ours
from reporting import in_turns, made_on, new_parser, publish, table
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

WANTED = {"update fp32": 2.5, "update bf16": 4.0, "rollout": 1.7}


class Theirs:
    """Rollout and update of RecurrentPPO with an LSTM that actor and critic share.

    Args:
        env: its environments.
        steps: steps of a rollout.
        memory: width of the LSTM.
        settings: further settings.
    """

    def __init__(self, env: VecEnv, steps: int, memory: int, **settings: Any) -> None:
        shared = {"lstm_hidden_size": memory, "shared_lstm": True, "enable_critic_lstm": False}
        self.model = RecurrentPPO(
            "MlpLstmPolicy", env, n_steps=steps, policy_kwargs=shared, **settings
        )
        self.model._setup_learn(10**9)
        self.callback = CallbackList([])
        self.callback.init_callback(self.model)
        self.model.logger.set_level(50)

    def collect(self) -> None:
        """Collect one rollout."""
        model = self.model
        buffer = model.rollout_buffer
        model.collect_rollouts(model.env, self.callback, buffer, n_rollout_steps=model.n_steps)

    def update(self) -> None:
        """Learn from the rollout."""
        self.model.train()


def idle(length: float = STEPS, device: torch.device = CPU) -> Theirs:
    """RecurrentPPO on environments that do nothing, with a rollout to learn from.

    Args:
        length: steps of an episode. RecurrentPPO steps through the LSTM in Python if an episode
            begins within a batch; otherwise it makes one call.
        device: device of the policy.
    """
    env = DummyVecEnv([lambda: Idle(length)] * ENVS)
    whole = {"batch_size": STEPS * ENVS, "n_epochs": 1, "device": device}
    theirs = Theirs(env, STEPS, MEMORY, **whole)
    theirs.collect()
    theirs.collect()
    return theirs


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    theirs, full, half = idle(), Ours(None), Ours(torch.bfloat16)
    calls = {
        "sb3 update": theirs.update,
        "sb3 update where no episode begins": idle(float("inf")).update,
        "esper update fp32": full.update,
        "esper update bf16": half.update,
        "sb3 rollout": theirs.collect,
        "esper rollout": full.collect,
        "esper rollout bf16": half.collect,
    }
    times = in_turns(calls, arguments.repeats)
    ratios = {}
    for what in ("update fp32", "update bf16", "rollout", "rollout bf16"):
        pairs = zip(times[f"sb3 {what.split()[0]}"], times[f"esper {what}"], strict=True)
        ratios[what] = [theirs / ours for theirs, ours in pairs]
    rows = [
        (name, f"{wall:.4f}", f"{cpu:.4f}", f"{STEPS * ENVS / wall:,.0f}")
        for name, (wall, cpu) in times.items()
    ]
    compared = [
        (what, f"{wall:.2f}", f"{cpu:.2f}", WANTED.get(what, "-"))
        for what, (wall, cpu) in ratios.items()
    ]
    made = made_on(f"sb3-contrib {version('sb3-contrib')}", f"load {os.getloadavg()[0]:.1f}")
    parts = (
        f"Observation {INPUTS}, shared LSTM {MEMORY}, heads {list(OPTIONS)}, {STEPS} steps x "
        f"{ENVS} environments, 1 epoch of the full batch; medians of {arguments.repeats} "
        "alternating repetitions.",
        table(("what", "wall, s", "CPU, s", "steps/s (wall)"), rows),
        table(("times as fast as RecurrentPPO", "wall", "CPU", "required"), compared),
        f"{made}, 1 thread.",
    )
    figures = {"seconds": times, "ratios": ratios}
    title = "Speed of update and rollout compared with sb3-contrib"
    publish("gym_speed", title, parts, arguments.write, figures)
    return 0 if all(ratios[what][0] >= least for what, least in WANTED.items()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
