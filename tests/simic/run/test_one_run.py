"""A run is one thing: what was edited, exchanged or changed since its checkpoint is refused."""

import json
import platform
import re
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from esper.leyline.config import unflatten
from esper.leyline.config.offline import ImitationConfig
from esper.leyline.errors import UsageError
from esper.leyline.metrics import Metric
from esper.runtime.data import Dataset
from esper.runtime.gate import Permission
from esper.runtime.tasks import TASKS
from esper.runtime.text import text
from esper.simic.growth import environment
from esper.simic.offline.offline_run import learn_offline, resumed_config
from esper.simic.run import identity
from esper.simic.run.checkpoint import load_latest
from esper.simic.run.identity import check_same_run, identity_of
from esper.simic.run.run_directory import processor_name
from esper.simic.training.vectorized import resume_ppo, run_training, train_ppo_vectorized
from small_runs import SMALL


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return train_ppo_vectorized(rounds=1, telemetry_dir=str(folder), record=True, **SMALL).path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def edited(run: Path, change) -> None:
    path = run / "config.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def refused(run: Path, field: str, **settings: object) -> str:
    """Resuming is refused in one line that begins with ``field``, and changes nothing."""
    before = contents(run)
    with pytest.raises(UsageError, match=f"^{field}: ") as error:
        resume_ppo(run, {"rounds": 2, **settings})
    assert "\n" not in str(error.value)
    assert contents(run) == before
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("learning_rate", 0.5), ("seed", 7), ("envs", 2), ("lstm_hidden", 16), ("slots", [])),
        *(("reward", "sparse"), ("task", ["digits"]), ("episode_length", 2)),
    ],
)
def test_an_edited_setting_is_refused_by_its_name(run: Path, name: str, value: object) -> None:
    edited(run, lambda content: content["settings"].update({name: value}))
    said = refused(run, name)
    assert "config.json says" in said


def test_a_setting_that_was_removed_is_refused(run: Path) -> None:
    """It would silently take its default."""
    edited(run, lambda content: content["settings"].pop("envs"))
    refused(run, "envs")


def test_settings_that_flags_may_change_may_be_edited(run: Path) -> None:
    edited(run, lambda content: content["settings"].update(keep_checkpoints=1))
    assert resume_ppo(run, {"rounds": 2}).exit_code == 0
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["000002"]


@pytest.mark.parametrize("own", ["f" * 32, 7, None])
def test_another_id_is_refused(run: Path, own: object) -> None:
    edited(run, lambda content: content.update(id=own) if own else content.pop("id"))
    refused(run, "id")


def test_the_checkpoint_of_another_run_is_refused(run: Path, tmp_path: Path) -> None:
    """Even one that was trained with the same settings."""
    other = train_ppo_vectorized(rounds=1, telemetry_dir=str(tmp_path / "other"), **SMALL).path
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(other / "checkpoints", run / "checkpoints")
    refused(run, "id")


def test_a_changed_plugin_is_refused_and_not_executed(tmp_path: Path) -> None:
    plugin, trace = tmp_path / "own.py", tmp_path / "executed"
    plugin.write_text("")
    settings = {**SMALL, "plugin": [str(plugin)], "telemetry_dir": str(tmp_path / "runs")}
    run = train_ppo_vectorized(rounds=1, **settings).path
    # Another file, because one process executes a file only once.
    moved = tmp_path / "moved.py"
    moved.write_text(f"open({str(trace)!r}, 'w')")
    edited(run, lambda content: content["settings"].update(plugin=[str(moved)]))
    refused(run, "plugin")
    assert not trace.exists()
    resume_ppo(run, {"rounds": 2, "plugin": [str(moved)]}, permission=Permission((str(moved),)))
    assert trace.exists()
    assert load_latest(run).identity.plugins == identity_of("", _with(plugin=[moved]), {}).plugins


def test_a_plugin_that_lost_the_task_is_refused_as_another_plugin(
    tmp_path: Path, scratch_register: None
) -> None:
    plugin, empty = tmp_path / "own.py", tmp_path / "empty.py"
    plugin.write_text(
        "from dataclasses import replace\n"
        "from esper.runtime.tasks import find, task\n"
        "@task\n"
        "def lost():\n"
        "    return replace(find('digits_shift'), name='lost')\n"
    )
    empty.write_text("")
    settings = SMALL | {"task": ["lost"], "plugin": [str(plugin)]}
    config = unflatten({**settings, "rounds": 1, "telemetry_dir": str(tmp_path / "runs")})
    run = run_training(config, "ppo", permission=Permission((str(plugin),))).path
    edited(run, lambda content: content["settings"].update(plugin=[str(empty)]))
    TASKS.pop("lost")
    with pytest.raises(UsageError, match=r"^plugin: "):
        resume_ppo(run, {"rounds": 2}, permission=Permission((str(empty),)))


def _with(**settings: object):
    return unflatten({name: list(map(str, v)) for name, v in settings.items()})


def test_other_data_are_refused(run: Path, monkeypatch) -> None:
    assert list(load_latest(run).identity.data) == ["digits_shift"]
    monkeypatch.setattr(environment, "data_digests", lambda _: {"digits_shift": "other"})
    assert "the data of digits_shift have changed" in refused(run, "data_dir")


def test_another_text_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("before")
    config = unflatten({"text_file": str(file)})
    then = identity_of("", config, {})
    check_same_run(tmp_path, then, identity_of("", config, {}), plugins_given=False)
    file.write_text("after")
    with pytest.raises(UsageError, match=r"^text_file: the file has changed"):
        check_same_run(tmp_path, then, identity_of("", config, {}), plugins_given=True)


def data(**changes: torch.Tensor) -> Dataset:
    images, labels = torch.arange(24.0).view(3, 2, 2, 2), torch.tensor([0, 1, 1])
    each = {
        f"{s}_{k}": v
        for s in ("train", "validation", "test")
        for k, v in (("images", images), ("labels", labels))
    }
    return Dataset(**(each | changes), classes=2)


def test_the_digest_of_data_depends_on_each_number_and_on_nothing_else(tmp_path: Path) -> None:
    images, labels = data().train_images, data().train_labels
    strided = images.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    gaps = torch.zeros(3, 2, 2, 4)[..., ::2].copy_(images)
    for same in (images.clone(), images.double(), strided, gaps):
        assert data(train_images=same).digest == data().digest
    changed, flipped = images.clone(), labels.clone()
    changed[2, 1, 1, 1] += 1e-5
    flipped[0] = 1
    others = [
        *({f"{s}_images": changed} for s in ("train", "validation", "test")),
        *({f"{s}_labels": flipped} for s in ("train", "validation", "test")),
        {"train_images": images.view(3, 2, 2, 2).flip(0)},
    ]
    digests = [data(**other).digest for other in others]
    assert len({*digests, data().digest}) == len(others) + 1
    # Windows of a text overlap in memory.
    file = tmp_path / "text"
    first = bytes(range(97, 123)) * 100
    found = []
    for content in (first, first, first[:10] + b"!" + first[11:], b"!" + first[1:]):
        file.write_bytes(content)
        found.append(text(file, 4).digest)
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_switches_of_the_environment_are_recorded_announced_and_compared(
    run: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("ESPER_DISABLE_LR_SCHEDULE", "1")
    begun = train_ppo_vectorized(rounds=1, telemetry_dir=str(tmp_path / "on"), **SMALL).path
    assert capsys.readouterr().err == (
        "ESPER_DISABLE_LR_SCHEDULE: learning rates are constant, whatever the settings say\n"
    )
    assert load_latest(begun).identity.switches == ["ESPER_DISABLE_LR_SCHEDULE"]
    fingerprint = json.loads((begun / "config.json").read_text())["fingerprint"]
    assert fingerprint["switches"] == ["ESPER_DISABLE_LR_SCHEDULE"]
    resume_ppo(run, {"rounds": 2})
    assert "warning: ESPER_DISABLE_LR_SCHEDULE: off until now, on from" in capsys.readouterr().err
    resume_ppo(run, {"rounds": 3})
    assert "until now" not in capsys.readouterr().err
    monkeypatch.setenv("ESPER_DISABLE_LR_SCHEDULE", "0")
    resume_ppo(begun, {"rounds": 2})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ESPER_DISABLE_LR_SCHEDULE: on until now, off from here on")


def test_every_switch_has_a_line() -> None:
    found = {f"ESPER_{what}" for what in ("DISABLE_AMP", "DISABLE_LR_SCHEDULE")}
    assert set(identity.SWITCHES) == found


def test_the_switch_also_stops_the_adaptive_rate(tmp_path: Path, monkeypatch) -> None:
    """A target that no update reaches raises the rate after each, unless it is switched off."""
    adaptive = {**SMALL, "lr_adaptive_kl": 1e3, "telemetry_dir": str(tmp_path)}
    run = train_ppo_vectorized(rounds=2, **adaptive)
    rates = [summary.metrics[Metric.LEARNING_RATE] for summary in run.rounds]
    assert rates[1] == pytest.approx(1.5 * rates[0])
    monkeypatch.setenv("ESPER_DISABLE_LR_SCHEDULE", "1")
    run = resume_ppo(run.path, {"rounds": 4})
    assert [summary.metrics[Metric.LEARNING_RATE] for summary in run.rounds] == rates[:1] * 2
    factor = load_latest(run.path).parts["counters"]["rate_factor"]
    assert factor.item() == pytest.approx(1.5**2), "kept for when the switch is off again"


def test_an_edited_run_that_learns_from_records_is_refused(trained: Path, tmp_path: Path) -> None:
    sizes = {"epochs": 1, "held_out": 0.0, "lstm_hidden": 8, "threads": 1, "batch_size": 4}
    config = ImitationConfig(records=(str(trained),), telemetry_dir=str(tmp_path), **sizes)
    run = learn_offline(config).path
    edited(run, lambda content: content["offline"]["settings"].update(learning_rate=0.5))
    again = resumed_config(ImitationConfig, run, {"epochs": 2})
    with pytest.raises(UsageError, match=r"^learning_rate: .*config\.json says 0\.5"):
        learn_offline(again, resume=run)
    edited(run, lambda content: content["offline"]["settings"].update(learning_rate=1e-3))
    again = resumed_config(ImitationConfig, run, {"epochs": 2})
    assert learn_offline(again, resume=run).exit_code == 0


def test_an_identity_survives_the_manifest(run: Path) -> None:
    stored = load_latest(run).identity
    assert msgspec.convert(json.loads(msgspec.json.encode(stored)), type(stored)) == stored
    assert stored.settings["envs"] == SMALL["envs"]
    assert "rounds" not in stored.settings


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the system names no processor")
def test_the_processor_has_the_name_that_the_system_gives_it() -> None:
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    assert processor_name() == (names[0] if names else platform.machine())
