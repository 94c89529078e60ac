"""What do masks, autoregressive heads and telemetry cost? Times them against a plain policy.

    python benchmarks/policy_update.py --write

Times update and rollout of the growth policy against a minimal recurrent policy: one linear
encoder, one ``nn.LSTM`` call over the whole sequence, one linear map to all heads, one padded
log-softmax, one value, fused Adam. 150 steps of 16 environments, one epoch of the full batch, one
thread; the two take turns. Then times whole training loops at telemetry levels off, normal and
debug.
"""

import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch
from reporting import in_turns, made_on, new_parser, publish, table
from torch import Tensor, nn

from esper.leyline.actions import HEAD_WIDTHS, HEADS
from esper.leyline.config import LearnerConfig
from esper.runtime.tasks import find
from esper.simic.growth.agent import growth_agent
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.features import Observation
from esper.tolaria.precision import Precision

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from hot_path_workload import Loop, Workload

STEPS, ENVS, INPUTS = 150, 16, 128
CPU = torch.device("cpu")
State = tuple[Tensor, Tensor]


class PlainPolicy(nn.Module):
    """The reference: no masks, and no head depends on another."""

    def __init__(self, hidden: int, widths: list[int]):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(INPUTS, hidden), nn.ReLU())
        self.lstm = nn.LSTM(hidden, hidden)
        self.heads = nn.Linear(hidden, sum(widths))
        self.value = nn.Linear(hidden, 1)
        widest = max(widths)
        place, index = 0, []
        for width in widths:
            index.append([place + i if i < width else sum(widths) for i in range(widest)])
            place += width
        self.index = torch.tensor(index)

    def forward(self, x: Tensor, hidden: State | None = None) -> tuple[Tensor, Tensor, State]:
        """Return log-probabilities of all options, values, and the state of the LSTM."""
        memory, hidden = self.lstm(self.encoder(x), hidden)
        logits = nn.functional.pad(self.heads(memory), (0, 1), value=-1e9)
        return logits[..., self.index].log_softmax(-1), self.value(memory)[..., 0], hidden


class Plain:
    """Rollout step and update of the reference."""

    def __init__(self, hidden: int):
        widths = [HEAD_WIDTHS.get(head, 2) for head in HEADS]
        self.policy = PlainPolicy(hidden, widths)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-4, eps=1e-5, fused=True)
        self.x = torch.randn(STEPS, ENVS, INPUTS)
        with torch.no_grad():
            log_probs, _, _ = self.policy(self.x)
            self.actions = log_probs.argmax(-1, keepdim=True)
            self.old = log_probs.gather(-1, self.actions)[..., 0].sum(-1)
        self.advantages, self.targets = torch.randn(2, STEPS, ENVS)

    def update(self) -> None:
        """Do one PPO update."""
        log_probs, value, _ = self.policy(self.x)
        log_ratio = log_probs.gather(-1, self.actions)[..., 0].sum(-1) - self.old
        ratio = log_ratio.exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * self.advantages, clipped * self.advantages).mean()
        loss = loss + 0.25 * (value - self.targets).square().mean()
        loss = loss + 0.01 * (log_probs.exp() * log_probs).sum((-1, -2)).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
        self.optimizer.step()

    @torch.no_grad()
    def act(self) -> None:
        """Choose actions for all steps of a rollout."""
        hidden = None
        for x in self.x:
            log_probs, _, hidden = self.policy(x[None], hidden)
            gumbel = -torch.log(-torch.log(torch.rand_like(log_probs)))
            (log_probs + gumbel).argmax(-1)


class Growth:
    """Rollout step and update of the growth policy, on a repeated real observation."""

    def __init__(self, hidden: int):
        config = LearnerConfig(lstm_hidden=hidden, ppo_epochs=1, minibatches=1, target_kl=1e9)
        self.agent = growth_agent(config, 1, CPU)
        growth = GrowthConfig(seed=1, episode_length=STEPS, max_batches=1, batch_size=8)
        task = find("digits_shift")
        env = GrowthEnv([task], torch.arange(ENVS), growth, Precision("cpu"), CPU)
        self.environments, self.observation = env.environments, env.reset(0)
        self.agent.begin(self.environments, 0)
        first = self.agent.act(self.observation, 0)
        self.rollout = Rollout(STEPS, self.observation, first[0])
        tensors = self.observation.tensors()
        for t in range(STEPS):
            observation = Observation.from_tensors(tensors)
            self.rollout.write(t, observation, *self.agent.act(observation, t))
            self.rollout.outcome(t, torch.randn(ENVS), t + 1 == STEPS)

    def update(self) -> None:
        """Do one PPO update."""
        self.agent.update(self.rollout)

    def act(self) -> None:
        """Choose actions for all steps of a rollout."""
        self.agent.begin(self.environments, 0)
        with self.agent.policy.frozen_weights():
            for t in range(STEPS):
                self.agent.act(self.observation, t)


def policies(hidden: int, repeats: int) -> list[tuple[object, ...]]:
    """Return the median times of both policies, and their ratios."""
    plain, growth = Plain(hidden), Growth(hidden)
    rows: list[tuple[object, ...]] = []
    for name, what in (("update", "update"), ("act", f"{STEPS} rollout steps")):
        times = in_turns({"plain": getattr(plain, name), "growth": getattr(growth, name)}, repeats)
        a, b = (1e3 * times[who][0] for who in ("plain", "growth"))
        rows.append((hidden, what, f"{a:.1f}", f"{b:.1f}", f"{b / a:.2f}"))
    return rows


def telemetry(workload: Workload, backend: str, repeats: int) -> dict[str, float]:
    """Return milliseconds a step of whole loops by telemetry level.

    The loops take turns step by step.
    """
    levels = ("off", "normal", "debug")
    loops = {level: Loop(replace(workload, telemetry=level), backend) for level in levels}
    times: dict[str, list[float]] = {level: [] for level in levels}
    for _ in range(repeats + 1):
        for loop in loops.values():
            loop.begin()
            loop.clear()
        for _ in range(workload.episode_length):
            for loop in loops.values():
                loop.step()
        for level, loop in loops.items():
            loop.end()
            times[level].append(1e3 * loop.seconds / workload.episode_length)
    for loop in loops.values():
        loop.close()
    return {level: statistics.median(times[level][1:]) for level in levels}


def telemetry_rows(found: dict[str, float]) -> list[tuple[str, ...]]:
    """Return the times of ``telemetry`` as rows of a table, with what a level costs."""
    return [
        (level, f"{value:.1f}", f"{100 * (value / found['off'] - 1):+.1f} %")
        for level, value in found.items()
    ]


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for hidden in (128, 512) for row in policies(hidden, arguments.repeats)]
    workload = Workload(envs=64, episode_length=20, threads=os.cpu_count() or 1)
    levels = telemetry(workload, "auto", arguments.repeats)
    parts = (
        f"{STEPS} steps of {ENVS} environments, one epoch of the full batch, one thread; medians "
        f"of {arguments.repeats} alternating repetitions. The plain policy has one linear "
        "encoder, one LSTM call, one linear map to all heads and one padded log-softmax. It has "
        "less to compute: the growth policy's layers take 1.6 times as many multiplications "
        "with an LSTM of 128, and 1.1 times with 512.",
        table(("LSTM", "what", "plain, ms", "growth policy, ms", "ratio"), rows),
        "Whole training loops, `digits_shift`, 64 environments, alternating:",
        table(("telemetry", "ms per step", "against off"), telemetry_rows(levels)),
        f"{made_on()}.",
    )
    title = "What masks, autoregressive heads and telemetry cost"
    publish("policy_update", title, parts, arguments.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
