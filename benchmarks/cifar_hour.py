"""What does training on CIFAR-10's shape reach in an hour on two cores?

    python benchmarks/cifar_hour.py --write --work runs/cifar_hour

CIFAR-10 itself is not downloaded. The files have its format and counts; each image is one of
scikit-learn's digits on a ground of another colour that brightens to one side, both colours drawn,
at a drawn position and size, with noise. The 10,000 test images show digits that no training image
shows. The command trains until it has used two hours of processor time on two threads, so other
work on the machine costs only the steps that are lost in shared caches. Policies that do not learn
play the first round, on the same hosts.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from reporting import kept, made_on, new_parser, publish, table
from sklearn.datasets import load_digits

SIDE, TEST_DIGITS, BATCH, ENVS = 32, 297, 10_000, 16
WORLD = "--task cifar_baseline --envs 16 --validation-part 500 --threads 2 --seed 7"
CONTROLS = ("rule", "random")
SELECT = """
    SELECT round, count(*) AS episodes, avg(test_accuracy) AS accuracy,
        avg(twin_test_accuracy) AS twin, avg(gain) AS gain, avg(added_parameters) AS added,
        avg(fossilised) AS fossilised
    FROM episodes GROUP BY round ORDER BY round
"""


def write_files(folder: Path) -> None:
    """Write ``cifar-10-batches-bin`` in ``folder``: five batches of training and one of test."""
    digits = load_digits()
    order = np.random.default_rng(1).permutation(len(digits.images))
    target = folder / "cifar-10-batches-bin"
    target.mkdir(parents=True, exist_ok=True)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for seed, name in enumerate(names):
        rows = order[:TEST_DIGITS] if name == "test_batch" else order[TEST_DIGITS:]
        draws = np.random.default_rng(seed)
        rows = draws.choice(rows, BATCH)
        pixels = new_images(torch.tensor(digits.images[rows] / 16.0, dtype=torch.float32), draws)
        labels = digits.target[rows].astype(np.uint8)
        (target / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], pixels], 1).tobytes())


def new_images(shapes: torch.Tensor, draws: np.random.Generator) -> np.ndarray:
    """Images uint8 ``[n, 3 * 32 * 32]`` of digits ``[n, 8, 8]`` in [0, 1]."""
    count = len(shapes)
    poses = np.zeros((count, 2, 3))
    poses[:, [0, 1], [0, 1]] = draws.uniform(1.0, 1.8, (count, 1))
    poses[:, :, 2] = draws.uniform(-0.4, 0.4, (count, 2))
    grid = F.affine_grid(
        torch.tensor(poses, dtype=torch.float32), [count, 1, SIDE, SIDE], align_corners=False
    )
    alpha = F.grid_sample(shapes[:, None], grid, align_corners=False).numpy()
    front, back = draws.uniform(0, 1, (2, count, 3, 1, 1))
    slope = draws.uniform(-0.4, 0.4, (count, 1, 2))
    axis = np.linspace(-1, 1, SIDE)
    light = slope[..., :1, None] * axis[:, None] + slope[..., 1:, None] * axis
    images = alpha * front + (1 - alpha) * (back + light) + draws.normal(0, 0.1, alpha.shape)
    return (images.clip(0, 1) * 255).astype(np.uint8).reshape(count, -1)


def processor_seconds(process: int) -> float:
    """Return the seconds that a living process has used, of all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def esper(*arguments: str) -> list[str]:
    """Return the command line of ``esper`` with these arguments."""
    return [sys.executable, "-m", "esper.scripts.main", *arguments]


def train(work: Path, core_seconds: float) -> dict[str, Any]:
    """Train for ``core_seconds`` of processor time; return the rounds that ended."""
    write_files(work)
    begin, used, telemetry = time.monotonic(), 0.0, work / "telemetry"
    with subprocess.Popen(command("ppo", work, telemetry, 100_000)) as process:
        while process.poll() is None and used < core_seconds:
            time.sleep(5)
            used = processor_seconds(process.pid)
        if process.poll() is not None:
            raise RuntimeError(f"training ended with exit status {process.returncode}")
        wall = time.monotonic() - begin
        process.send_signal(signal.SIGTERM)
    return {"core_seconds": used, "wall": wall, "rounds": rounds_of(telemetry)}


def command(name: str, work: Path, telemetry: Path, rounds: int) -> list[str]:
    """Return the command line of a training."""
    flags = [f"--rounds={rounds}", f"--data-dir={work}", f"--telemetry-dir={telemetry}"]
    return esper("train", name, *shlex.split(WORLD), *flags)


def play(name: str, work: Path) -> list[dict[str, Any]]:
    """Play one round with a policy that does not learn."""
    subprocess.run(command(name, work, work / name, 1), check=True)
    return rounds_of(work / name)


def rounds_of(telemetry: Path) -> list[dict[str, Any]]:
    """Return the means of the rounds whose episodes all ended."""
    query = esper("query", str(telemetry), SELECT, "--format=json")
    rounds = json.loads(subprocess.run(query, capture_output=True, check=True).stdout)
    return [row for row in rounds if row["episodes"] == ENVS]


def verdict(policies: dict[str, dict[str, Any]]) -> str:
    """Whether PPO's last round is above the best policy that does not learn."""
    *_, last = (row["gain"] for label, row in policies.items() if label.startswith("PPO"))
    gains = {name: policies[f"{name}, round 1"]["gain"] for name in CONTROLS}
    name, control = max(gains.items(), key=lambda each: each[1])
    side = "above" if last > control else "below"
    return (
        f"**PPO's last round gains {last:+.1f} points, {side} the {control:+.1f} of `{name}`**, "
        "the best of those that do not learn, on other hosts; a round has two of them, so "
        "differences of a few points mean nothing."
    )


def main() -> int:
    """Train, unless the result exists, and print the page."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/cifar_hour"))
    parser.add_argument("--core-hours", type=float, default=2.0)
    arguments = parser.parse_args()
    work = arguments.work
    result = kept(work / "result.json", lambda: train(work, 3600 * arguments.core_hours))
    policies = {f"PPO, round {row['round']}": row for row in result["rounds"]}
    for name in CONTROLS:
        (policies[f"{name}, round 1"],) = kept(work / f"{name}.json", partial(play, name, work))
    rows = [
        (
            label, f"{100 * row['accuracy']:.1f}", f"{100 * row['twin']:.1f}",
            f"{row['gain']:+.1f}", f"{row['added']:,.0f}", f"{row['fossilised']:.1f}",
        )
        for label, row in policies.items()
    ]  # fmt: skip
    heads = ("policy", "test accuracy, %", "never grown, %", "gain, points", "parameters", "seeds")
    parts = (
        f"`esper train ppo {WORLD}`, on files of CIFAR-10's format and size that show digits, had "
        f"after {result['core_seconds'] / 3600:.1f} hours of processor time "
        f"({result['wall'] / 60:.0f} minutes beside other work) ended these rounds of {ENVS} "
        "episodes. Means; parameters and fossilised seeds are those that were added, and the gain "
        "is that of test utility: the mean probability of the true class, minus the price. In "
        "round 1 all have the same hosts.",
        table(heads, rows),
        verdict(policies),
        f"{made_on()}.",
    )
    title = "CIFAR-10's shape in an hour on two cores"
    publish("cifar_hour", title, parts, arguments.write, policies)
    return 0


if __name__ == "__main__":
    sys.exit(main())
