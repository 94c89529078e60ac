"""Records of Gymnasium tasks: what they say follows from the physics of the task."""

from itertools import pairwise
from pathlib import Path

import gymnasium
import numpy as np
import pyarrow.parquet
import pytest
from msgspec.structs import replace

from esper.karn import query
from esper.leyline.errors import UsageError
from esper.leyline.records import record_files, run_identity, sealed_record, verified_record
from esper.simic.records.episodes import read_episodes
from esper.simic.records.record_columns import current_layout
from esper.simic.training.vectorized import resume_ppo, train_ppo_vectorized

LIMIT = 20


def train(folder: Path, gym: str, **settings) -> Path:
    small = {"envs": 3, "rollout_steps": 30, "rounds": 3, "lstm_hidden": 8, "ppo_epochs": 1}
    run = train_ppo_vectorized(
        gym=gym, record=True, episode_limit=LIMIT, telemetry_dir=str(folder), **small, **settings
    )
    return run.path


def by_environment(run: Path) -> list[list[dict]]:
    """The rows of each environment over all rounds, in order."""
    rows = [r for path in record_files(run) for r in pyarrow.parquet.read_table(path).to_pylist()]
    return [[row for row in rows if row["environment"] == i] for i in range(3)]


def state_of(gym: str, observation: list[float]) -> np.ndarray:
    if gym == "CartPole-v1":
        return np.array(observation)
    cosine, sine, speed = observation
    return np.array([np.arctan2(sine, cosine), speed])


@pytest.mark.parametrize("gym", ["CartPole-v1", "Pendulum-v1"])
def test_rows_follow_one_another_as_the_task_does(tmp_path: Path, gym: str) -> None:
    """Within rounds and across them; a step is repeated from what was observed and done."""
    environment = gymnasium.make(gym)
    environment.reset()
    ends = []
    for rows in by_environment(train(tmp_path, gym)):
        assert [row["round"] for row in rows] == [1] * 30 + [2] * 30 + [3] * 30
        expected = 1
        for row, follower in pairwise(rows):
            assert row["step"] == expected
            if row["final"]:
                assert row["reward"] is row["log_prob"] is None
                expected = 1
                continue
            environment.reset()
            environment.unwrapped.state = state_of(gym, row["observation"])
            action = row["actions"][0] if gym == "CartPole-v1" else np.array(row["numbers"])
            observation, reward, terminated, _, _ = environment.step(action)
            assert follower["observation"] == pytest.approx(observation, abs=2e-4)
            assert row["reward"] == pytest.approx(reward, abs=2e-4)
            assert row["terminated"] == terminated
            assert row["truncated"] == (row["step"] == LIMIT and not terminated)
            assert row["log_prob"] < 0.0 or gym == "Pendulum-v1"
            over = row["terminated"] or row["truncated"]
            assert follower["final"] == over
            ends += [row["truncated"]] * over
            expected += 1
    assert len(ends) > 8
    assert True in ends


def test_a_query_reads_them_beside_those_of_growing_networks(tmp_path: Path) -> None:
    run = train(tmp_path / "gym", "CartPole-v1")
    growth = train_ppo_vectorized(
        task="digits_shift", record=True, rounds=1, envs=2, max_batches=1, episode_length=3,
        telemetry_dir=str(tmp_path / "growth"),
    )  # fmt: skip
    sql = (
        "SELECT gym, count(*) AS rows, any_value(numbers) AS numbers FROM gym_records GROUP BY gym"
    )
    (row,) = query([run, growth.path], sql).to_pylist()
    assert row == {"gym": "CartPole-v1", "rows": 270, "numbers": None}
    (row,) = query([run, growth.path], "SELECT count(*) AS rows FROM records").to_pylist()
    assert row["rows"] == 6
    files = query([run, growth.path], "SELECT episodes, ops FROM record_files ORDER BY ALL")
    assert len(files.to_pylist()) == 4
    with pytest.raises(UsageError, match="is of a Gymnasium task, not of growing networks"):
        read_episodes([run])


def test_a_forged_layout_is_one_line(tmp_path: Path) -> None:
    run = train(tmp_path, "CartPole-v1")
    path = record_files(run)[0]
    header, _ = verified_record(path, run_identity(run))
    table, layout = pyarrow.parquet.read_table(path), header.gym
    for gym, growth in (
        (None, None),
        (layout, current_layout()),
        (replace(layout, features=-3), None),
        (replace(layout, options=[2**40]), None),
    ):
        path.write_bytes(sealed_record(table, replace(header, gym=gym, layout=growth)))
        with pytest.raises(UsageError, match=r"is damaged \(its header is wrong: "):
            query([run], "SELECT * FROM gym_records")


def test_a_resumed_run_has_every_round_once(tmp_path: Path) -> None:
    straight = train(tmp_path / "a", "CartPole-v1", entropy_decay_steps=3, lr_decay_steps=3)
    parted = train_ppo_vectorized(
        gym="CartPole-v1", record=True, episode_limit=LIMIT, envs=3, rollout_steps=30, rounds=2,
        lstm_hidden=8, ppo_epochs=1, entropy_decay_steps=3, lr_decay_steps=3,
        telemetry_dir=str(tmp_path / "b"),
    )  # fmt: skip
    resumed = resume_ppo(parted.path, {"rounds": 3})
    assert by_environment(straight) == by_environment(resumed.path)
