"""A setting is defined once, at its field; names of the prior system are taken."""

import ast
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esper.leyline.config import TrainConfig, check, flatten, former, unflatten
from esper.leyline.config.reading import settings_file
from esper.leyline.config.setting import about, settings_of, spellings
from esper.leyline.errors import UsageError
from esper.runtime.gate import NOTHING
from esper.scripts import train
from esper.simic.training.setup import resolve_tasks
from processes import ROOT, ran_python

SOURCE = ROOT / "src" / "esper"

FIELDS = '''
    loudness: int = setting(
        5, Range(2, 9), aliases=("volume",), defaults={"gym": 7}, on_resume=True
    )
    """How loud it is, in sones."""
    loudness_limit: float = setting(1.0, FRACTION, only="growth")
    """At which it stops."""
'''
ASK = """
import contextlib, io, json, sys
from esper.leyline.config import flatten, unflatten
from esper.scripts.entry import run_guarded
from esper.scripts.main import esper

def asked(line):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        run_guarded(esper, ["train", "ppo", *line.split()])
    return out.getvalue() + err.getvalue()

answers = {line: asked(line) for line in sys.argv[1:]}
answers["growth"] = flatten(unflatten({}))
answers["gym"] = flatten(unflatten({"gym": "CartPole-v1"}))
print(json.dumps(answers))
"""
LINES = {
    "--help-all": "--loudness INT, --volume INT",
    "--loudness three": "--loudness: must be a whole number, got 'three'",
    "--volume 1": "loudness: must lie between 2 and 9, got 1",
    "--loudness 3 --volume 4": "--loudness 3 and --volume 4 contradict each other",
    "--loudnes 3": "did you mean --loudness?",
    "--config-json right.json --rounds 0": "rounds: must lie between 1",
    "--config-json wrong.json": "volumes: there is no such setting; did you mean 'volume'?",
    "--config-json far.json": "loudness: must lie between 2 and 9, got 12",
    "--gym CartPole-v1 --loudness-limit 0.5": "loudness_limit: belongs to growing networks",
    "--resume run --loudness 4": "no checkpoint",
    "--resume run --loudness-limit 0.5": "loudness_limit: the run has 1.0, and resuming cannot",
}


def test_a_new_setting_needs_only_a_new_field(tmp_path: Path) -> None:
    copied = tmp_path / "src" / "esper"
    shutil.copytree(SOURCE, copied, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    groups = copied / "leyline" / "config" / "groups.py"
    before, after = groups.read_text().split("    envs: int")
    groups.write_text(f"{before}{FIELDS[1:]}    envs: int{after}")
    (tmp_path / "right.json").write_text('{"volume": 3, "loudness-limit": 0.5}')
    (tmp_path / "wrong.json").write_text('{"volumes": 3}')
    (tmp_path / "far.json").write_text('{"volume": 12}')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"settings": {}, "fingerprint": {}}')
    done = ran_python(ASK, *LINES, where=tmp_path, PYTHONPATH=str(copied.parent))
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    for line, says in LINES.items():
        assert says in " ".join(answers[line].replace("│", " ").split()), answers[line]
    text = " ".join(answers["--help-all"].replace("│", " ").split())
    assert "How loud it is, in sones. (default: 5; with --gym: 7)" in text
    assert (answers["growth"]["loudness"], answers["growth"]["loudness_limit"]) == (5, 1.0)
    assert answers["gym"]["loudness"] == 7
    assert "loudness_limit" not in answers["gym"]


READERS = (
    "leyline/config/setting.py", "leyline/config/reading.py", "scripts/entry.py",
    "scripts/flags.py", "scripts/train.py", "scripts/watched.py", "simic/training/vectorized.py",
)  # fmt: skip
"""Files that handle settings in general: a table of settings there would define them twice."""


@pytest.mark.parametrize("path", READERS)
def test_code_that_handles_settings_lists_none_of_them(path: str) -> None:
    names = set(spellings(TrainConfig))
    for node in ast.walk(ast.parse((SOURCE / path).read_text())):
        match node:
            case ast.List() | ast.Tuple() | ast.Set():
                items: list[Any] = node.elts
            case ast.Dict():
                items = node.keys
            case _:
                continue
        listed = {i.value for i in items if isinstance(i, ast.Constant)} & names
        assert len(listed) < 2, f"{path}:{node.lineno} lists {sorted(listed)}"


def test_no_spelling_names_two_settings() -> None:
    words = [w for n, f in settings_of(TrainConfig).items() for w in (n, *about(f).aliases)]
    assert len(words) == len(set(words))
    assert not former.FIELDS.keys() & set(words)


OLD: dict[str, tuple[Any, dict[str, Any]]] = {
    "n_episodes": (100, {"rounds": 100}), "n_envs": (4, {"envs": 4}),
    "max_epochs": (150, {"episode_length": 150}),
    "batch_size_per_env": (None, {"batch_size": None}), "lr": (3e-4, {"learning_rate": 3e-4}),
    "clip_ratio": (0.2, {"clip": 0.2}), "gamma": (0.995, {"discount": 0.995}),
    "gae_lambda": (0.98, {"trace_decay": 0.98}), "ppo_updates_per_batch": (1, {}),
    "recurrent_n_epochs": (1, {"ppo_epochs": 1}), "entropy_coef": (0.05, {"entropy": 0.05}),
    "entropy_coef_start": (None, {}), "entropy_coef_end": (None, {}),
    "entropy_coef_min": (0.01, {}), "entropy_anneal_episodes": (0, {}),
    "entropy_coef_per_head": (None, {}), "value_coef": (0.5, {"value_weight": 0.5}),
    "value_warmup_batches": (10, {"value_warmup_steps": 10}), "value_coef_start": (None, {}),
    "use_telemetry": (True, {}), "amp": (False, {"use_amp": False}),
    "amp_dtype": ("auto", {"amp_dtype": "auto"}),
    "compile_mode": ("default", {"compile": "default"}),
    "lstm_hidden_dim": (512, {"lstm_hidden": 512}), "chunk_length": (150, {}),
    "slots": (["r0c1"], {"slots": ["r0c1"]}), "max_seeds": (None, {"max_seeds": None}),
    "reward_mode": ("shaped", {"reward": "shaped"}), "reward_family": ("contribution", {}),
    "param_budget": (500_000, {}), "param_penalty_weight": (0.1, {}),
    "sparse_reward_scale": (1.0, {}),
    "rent_host_params_floor": (200, {"reward_options": ["rent_floor=200"]}),
    "basic_acc_delta_weight": (5.0, {}), "plateau_threshold": (0.5, {}),
    "improvement_threshold": (2.0, {}), "gradient_telemetry_stride": (10, {}),
    "seed": (42, {"seed": 42}), "task": (None, {}),
    "permissive_gates": (True, {"strict_gates": False}),
    **{f"auto_forward_g{gate}": (False, {}) for gate in (1, 2, 3)},
    **{f"disable_{what}": (False, {}) for what in ("pbrs", "terminal_reward", "anti_gaming")},
    "max_grad_norm": (1.0, {"host_gradient_norm": 1.0}),
}  # fmt: skip
"""The prior system's fields with their defaults, and what they set here."""


def test_every_field_of_the_prior_system_is_taken() -> None:
    documented = (ROOT / "docs" / "from-esper-lite.md").read_text()
    for name, (value, becomes) in OLD.items():
        assert f"`{name}`" in documented
        config = unflatten({name: value})
        assert config == unflatten(becomes), name
        assert becomes.items() <= flatten(config).items()


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        (
            {"entropy_coef_start": 0.15, "entropy_coef_end": 0.08, "n_envs": 128,
             "entropy_anneal_episodes": 3000},
            {"entropy": 0.15, "entropy_decay": "linear", "entropy_decay_steps": 24,
             "entropy_end_factor": pytest.approx(0.08 / 0.15)},
        ),
        (  # the minimum is reached on half of the way
            {"entropy_coef": 0.1, "entropy_coef_end": 0.0, "entropy_coef_min": 0.05, "n_envs": 1,
             "entropy_anneal_rounds": 40},
            {"entropy": 0.1, "entropy_decay_steps": 20, "entropy_end_factor": 0.5},
        ),
        ({"entropy_coef_start": 0.2}, {"entropy": 0.01}),  # no annealing
        (
            {"entropy_coef_per_head": {"op": 1.2, "blueprint": 3}},
            {"entropy_per_head": ["op=1.2", "blueprint=3"]},
        ),
        ({"value_warmup_batches": 5, "value_coef": 0.25, "value_coef_start": 0.1},
         {"value_warmup_steps": 5, "value_start_factor": 0.4, "value_weight": 0.25}),
        ({"max_grad_norm": 0.5}, {"host_gradient_norm": 0.5, "max_gradient_norm": 0.5}),
        ({"ppo_updates_per_batch": 3, "recurrent_n_epochs": 2}, {"ppo_epochs": 6}),
        ({"reward_mode": "minimal"}, {"reward": "sparse"}),
        ({"reward_mode": "shaped", "reward_family": "loss"}, {"reward": "loss_change"}),
        ({"param_budget": 80_000, "disable_pbrs": True, "sparse_reward_scale": 0.5},
         {"reward_options": ["parameter_budget=80000", "sparse_scale=0.5", "shaping=0"]}),
        ({"auto_forward_g1": True, "auto_forward_g3": True}, {"auto_advance": ["g1", "g3"]}),
        ({"use_telemetry": False}, {"telemetry_level": "off"}),
        ({"permissive_gates": False}, {"strict_gates": True}),
        ({"amp_dtype": "bf16"}, {"amp_dtype": "bfloat16"}),
        ({"chunk_length": 75, "max_epochs": 150}, {"episode_length": 150}),
        ({"rent_host_params_floor": 0}, {"reward_options": []}),
    ],
)  # fmt: skip
def test_a_field_of_the_prior_system_becomes_its_setting(
    given: dict[str, Any], becomes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "esper"):
        flat = flatten(unflatten(given))
    assert {name: flat[name] for name in becomes} == becomes
    for record in caplog.records:
        assert "\n" not in record.getMessage()
    changed = [name for name in becomes if name not in ("max_gradient_norm", "value_weight")]
    if caplog.records:
        assert any(name in caplog.text for name in (*changed, "chunk_length"))


def test_a_whole_file_of_the_prior_system_loads(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({name: value for name, (value, _) in OLD.items()}))
    config = unflatten(settings_file(path))
    assert (config.world.rounds, config.world.envs, config.world.reward) == (100, 4, "shaped")
    assert (config.learner.value_weight, config.learner.max_gradient_norm) == (0.5, 0.5)


def test_settings_of_esper_keep_their_own_ranges_beside_fields_of_the_prior_system(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", "esper"):
        config = unflatten({"entropy": 1e20, "entropy_coef_min": 0.02})
    check(config)
    assert config.learner.entropy == 1e20
    (record,) = caplog.records
    says = "entropy_coef_min: 0.02 changes nothing: there is no annealing of the entropy"
    assert record.getMessage() == says
    with pytest.raises(UsageError, match=r"^entropy_coef_start: must be a number from 0"):
        unflatten({"entropy_coef_start": "high"})


def test_the_part_of_the_validation_images_is_that_of_the_setting_or_of_the_task() -> None:
    for setting in ({}, {"validation_part": 100}):
        (task,) = resolve_tasks(unflatten({"task": ["digits_shift"]} | setting))
        assert task.validation_part == setting.get("validation_part")


@pytest.mark.parametrize("norm", [0.5, 3.0])
def test_the_clip_norm_of_hosts_is_that_of_every_task(norm: float) -> None:
    given = {"task": ["digits_shift", "digits_mlp"]}
    before, after = (
        resolve_tasks(unflatten(given | more)) for more in ({}, {"max_grad_norm": norm})
    )
    assert [task.max_gradient_norm for task in before] == [1.0, 1.0]
    assert after == tuple(replace(task, max_gradient_norm=norm) for task in before)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_grad_norm": "0.5"}, "must be a number from 0"),
        ({"param_budget": -1}, "must be a number from 0"),
        ({"entropy_coef_per_head": 3}, "must be an object of numbers"),
        ({"reward_mode": "generous"}, "must be one of 'terminal'"),
        ({"reward_family": "profit"}, "must be contribution or loss"),
        ({"auto_forward_g2": 1}, "must be true or false"),
        ({"permissive_gates": "yes"}, "must be true or false"),
        ({"amp_dtype": ["bf16"]}, "amp_dtype: must be one of"),
        ({"permissive_gates": True, "strict_gates": True}, "already given another value"),
        ({"disable-pbrs": {"a": [1]}}, "must be true or false"),
    ],
)
def test_an_unsupported_setting_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        unflatten(given)
    assert len(str(refused.value)) < 300


def test_switches_of_the_prior_system_set_what_they_stand_for() -> None:
    config = unflatten({"use_telemetry": False, "permissive-gates": False})
    assert (config.output.telemetry_level, config.world.strict_gates) == ("off", True)


HEAVY = ("torch", "duckdb", "pyarrow", "textual", "numpy")


@pytest.mark.parametrize(
    ("arguments", "code", "unwanted"),
    [
        ("--help", 0, (*HEAVY, "tyro", "rich")),
        ("train --help", 0, HEAVY),
        ("train ppo --help", 0, HEAVY),
        ("train heuristic -h", 0, HEAVY),
        ("train ppo --roundz 3", 2, HEAVY),
        ("train ppo --envs 0", 2, HEAVY),
        ("train ppo --config-json nowhere.json", 2, HEAVY),
    ],
)
def test_help_and_refusals_do_not_import_the_training_code(
    arguments: str, code: int, unwanted: tuple[str, ...], tmp_path: Path
) -> None:
    ask = (
        "import sys; from esper.scripts.main import main\n"
        "try: main()\n"
        "finally: print('imported', *sys.modules, file=sys.stderr)"
    )
    done = ran_python(ask, *arguments.split(), where=tmp_path)
    assert done.returncode == code, done.stderr
    imported = done.stderr.split("imported ")[1].split()
    assert not set(unwanted) & set(imported)


def test_memory_is_asked_for_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: TrainConfig) -> None:
        raise UsageError(f"envs: {config.world.envs} need too much")

    monkeypatch.setattr(train, "check_memory", refuse)
    with pytest.raises(UsageError, match="envs: 12 need too much"):
        train._new_config({"envs": 12}, None, NOTHING, None)
