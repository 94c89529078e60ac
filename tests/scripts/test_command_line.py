"""The command line as a user types it."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import esper as package
from esper.leyline import former_names
from esper.leyline.config import TrainConfig, flatten, unflatten
from esper.leyline.config.algorithm import algorithms, owner_of
from esper.leyline.config.reading import run_settings, settings_file
from esper.leyline.config.setting import about, settings_of
from esper.leyline.errors import UsageError
from esper.leyline.events import EVENTS
from esper.runtime.tasks import TASKS
from esper.scripts import main
from esper.scripts.completion import SHELLS, arguments_of
from esper.scripts.flags import read_flags
from esper.scripts.main import COMMANDS, esper
from esper.scripts.train import CONTROLS, train
from processes import ESPER, ROOT, called, ran, refusal
from small_runs import events_of

RECORDED = ROOT / "tests" / "recorded"
QUERY, SQL = f"query {RECORDED / 'anomalous'}", "SELECT round FROM updates"
SMOKE = "--episodes 1 --n-envs 2 --max-epochs 2 --max-batches 2 --slots mid --device cpu --use-amp"


def typed(arguments: str, where: Path) -> subprocess.CompletedProcess:
    return called(shlex.split(arguments), where)


def files(where: Path) -> list[Path]:
    return [path for path in where.rglob("*") if path.is_file()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_users_smoke_command_runs_in_mixed_precision_on_torch(
    dtype: str, tmp_path: Path
) -> None:
    arguments = f"ppo {SMOKE} --backend torch --amp-dtype {dtype}"
    done = called(arguments.split(), tmp_path, train)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    snapshots = events_of(run, "ANALYTICS_SNAPSHOT")
    assert [(s["amp_enabled"], s["amp_dtype"]) for s in snapshots] == [(True, dtype)]


def test_the_users_smoke_command_runs_as_written(tmp_path: Path) -> None:
    done = ran([sys.executable, "-m", "esper.scripts.train", "ppo", *SMOKE.split()], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning") == 1
    assert "use_amp" in done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert f"run directory: runs/{run.name}" in done.stdout
    assert [s["amp_enabled"] for s in events_of(run, "ANALYTICS_SNAPSHOT")] == [False]
    for figure in ("accuracy grown", "twin", "germinated", "fossilised", "pruned"):
        assert figure in done.stdout
    assert "steps per second" in done.stdout


@pytest.mark.parametrize("policy", ["heuristic", "rule", "random", "schedule"])
def test_the_controls_run_from_the_command_line(policy: str, tmp_path: Path) -> None:
    done = typed(
        f"train {policy} --envs 2 --episode-length 2 --max-batches 1 --batch-size 8 --rounds 2 "
        "--record --record-last 1",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    (run,) = (tmp_path / "runs").iterdir()
    sql = "SELECT policy, round, steps FROM record_files"
    asked = called(["query", str(run), sql, "--format", "csv"], tmp_path)
    assert asked.stdout.splitlines() == ["policy,round,steps", f"{policy},2,2"]


@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
def test_help_is_grouped_and_gives_every_setting_with_its_default(
    algorithm: str, tmp_path: Path
) -> None:
    done = typed(f"train {algorithm} --help-all", tmp_path)
    assert done.returncode == 0
    for group in ("world", "learner", "machine", "output", "source"):
        assert f"{group} options" in done.stdout
    text = re.sub(r"[\s│]+", " ", done.stdout)
    flags = {
        "--" + name.replace("_", "-")
        for name, field in run_settings().items()
        if name != "algorithm" and about(field).only in (None, "growth", "gym")
        if (owner := owner_of(name)) is None or owner.name == algorithm
    }
    described: dict[str, str] = {}
    for word in re.split(r"[\s,]+", text):
        current = word if word in flags and word not in described else None
        if current:
            described[current] = ""
        elif described:
            described[next(reversed(described))] += " " + word
    assert described.keys() == flags
    assert [flag for flag, words in described.items() if "(default:" not in words] == []


@pytest.mark.parametrize("program", ["ppo", "heuristic"])
def test_help_shows_the_main_settings_and_ends_with_how_to_see_all(
    program: str, tmp_path: Path
) -> None:
    short, complete = (typed(f"train {program} {flag}", tmp_path) for flag in ("-h", "--help-all"))
    assert (short.returncode, complete.returncode) == (0, 0)
    last = short.stdout.rstrip().splitlines()[-1]
    assert re.fullmatch(rf"esper train {program} --help-all shows all \d+ settings", last)
    assert len(short.stdout.splitlines()) < len(complete.stdout.splitlines()) / 1.5
    assert "--envs" in short.stdout
    assert ("--rollout-steps" in short.stdout) == (program == "ppo")
    assert "--stage-shaping" not in short.stdout


def test_version_is_printed_and_stands_in_the_help(tmp_path: Path) -> None:
    done = typed("--version", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"esper {package.__version__}\n"
    assert "--version" in typed("--help", tmp_path).stdout
    assert files(tmp_path) == []


def test_version_is_printed_by_the_module_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('the version needs no torch')")
    done = ran([*ESPER, "--version"], PYTHONPATH=f"{tmp_path}:{ROOT / 'src'}")
    assert (done.returncode, done.stdout) == (0, f"esper {package.__version__}\n"), done.stderr


MISTAKES = [
    ("train ppo --roundz 3", "--rounds"), ("train ppo --rounds three", "--rounds"),
    ("train ppo --zzz 3", "esper train ppo --help-all lists all settings"),
    ("runs --zzz 3", "esper runs --help lists all settings"), ("train ppo --envs 0", "envs"),
    ("train ppo --envs -1", "envs"), ("train ppo --learning-rate nan", "learning_rate"),
    ("train ppo --discount 1.5", "discount"), ("train ppo --clip 1e39", "clip"),
    ("train ppo --slots --rounds 1", "slots"), ("train ppo --envs 2 4", "envs"), ("train", "ppo"),
    ("train ppo --batch-size 1", "batch_size"), ("train ppo --seed -1", "seed"),
    ("train ppo --rounds 2 --episodes 3", "contradict"),
    ("train ppo --envs 2 --n-envs 4", "contradict"), ("train ppo --slots r9c9", "r0c0"),
    ("train ppo --task digit_shift", "digits_shift"), ("train ppo --reward most", "paired"),
    ("train ppo --telemetry-level loud", "normal"), ("train ppo --device cuda:99", "device"),
    ("train ppo --device toaster", "device"), ("train ppo --device meta", "device"),
    ("train ppo --resume nowhere --rounds 3", "resume"),
    ("train ppo --config-json nowhere.json", "config_json"),
    ("train ppo --telemetry-dir /proc/nowhere", "telemetry_dir"),
    ("train heuristic --learning-rate 0.1", "--learning-rate"), ("train pop", "ppo"),
    ("trian", "train"), ("tasks digits_wid", "did you mean 'digits_wide'"),
    ("tasks digits digits", "twice"),
    ("tasks --plugin nowhere.py", "plugin: cannot read 'nowhere.py'"), ("train ppo stray", "stray"),
    ("train ppo --threads 100000", "threads"), ("train ppo --lstm-hidden 100000000", "lstm_hidden"),
    ("train ppo --envs 1000000", "envs"), ("train ppo --use-amp --no-use-amp", "contradict"),
    ("train ppo --telemetry-dir ~nosuchuser/x", "telemetry_dir"),
    ("train ppo --telemetry-dir=", "telemetry_dir"), ("train ppo --name a/b", "name"),
    ("train imitation --records run --name ..", "name"), ("train ppo --seeds 0", "seeds"),
    ("train ppo --seeds 2 --resume run", "seeds"), ("train rule --seeds 2 --sanctum", "sanctum"),
    ("train ppo --seeds 2 --seed 4294967295", "seeds"), ("train ppo --seeds 2 --task nope", "task"),
    ("train impala --lag -1", "lag"), ("train ppo --lag 1", "--lag"),
    ("sanctum nowhere", "nowhere"), ("sanctum a b", "one"), ("sanctum --lihgt", "--light"),
    (f"sanctum {RECORDED / 'healthy'}", "terminal"), ("query", "needs runs and SQL"),
    (QUERY, "needs runs and SQL"), (f"{QUERY} 'SELECT nope FROM updates'", "SQL: "),
    (f"{QUERY} '{SQL}' --format xml", "--format: "), (f"{QUERY} '{SQL}' --format parquet", "-o"),
    (f"{QUERY} '{SQL}' -o /nope/x", "output: "), (f"query /nope '{SQL}'", "run: "),
    (f"{QUERY} '{SQL}' --forma csv", "did you mean --format?"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "says"), MISTAKES, ids=[command[-30:] for command, _ in MISTAKES]
)
def test_a_usage_error_is_one_short_line_and_exit_status_2(
    tmp_path: Path, command: str, says: str
) -> None:
    done = typed(command, tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    message = done.stdout + done.stderr
    assert says in message
    assert "Traceback" not in message
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert files(tmp_path) == []


@pytest.mark.parametrize("command", ["trian", "train ppo --roundz 3"])
def test_the_installed_command_reports_the_same_usage_error(tmp_path: Path, command: str) -> None:
    here, there = typed(command, tmp_path), ran([*ESPER, *command.split()], tmp_path)
    assert (there.returncode, there.stdout, there.stderr) == (2, "", here.stderr)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"roundz": 3}', "rounds"), ('{"rounds": "3"}', "rounds"), ('{"rounds": true}', "rounds"),
        ('{"rounds": 1, "n_episodes": 2}', "n_episodes"), ('{"slots": 3}', "slots"),
        ('{"rounds": 1, "rounds": 2}', "rounds: appears twice"),
        ('{"learning_rate": 1' + "0" * 400 + "}", "learning_rate"),
        ('{"learning_rate": NaN}', "learning_rate"), ('{"reward": "most"}', "reward"),
        ("[1]", "object"), ("{", "JSON"),
    ],
)  # fmt: skip
def test_a_wrong_settings_file_names_the_key(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=says):
        settings_file(path)


def test_flags_take_precedence_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"n_envs": 2, "max_epochs": 2, "max_batches": 1, "rounds": 3}))
    done = typed(f"train ppo --config-json {path} --rounds 1 --batch-size 8", tmp_path)
    assert done.returncode == 0, done.stderr
    (stored,) = (tmp_path / "runs").glob("*/config.json")
    settings = json.loads(stored.read_text())["settings"]
    assert (settings["envs"], settings["episode_length"], settings["rounds"]) == (2, 2, 1)
    assert settings["seed"] == TrainConfig().world.seed


def test_every_alias_stands_for_its_setting() -> None:
    defaults = flatten(TrainConfig())
    for name, field in settings_of(TrainConfig).items():
        for alias in about(field).aliases:
            assert unflatten({alias: defaults[name]}) == TrainConfig()
            switch = isinstance(defaults[name], bool)
            words = [] if switch else [str(defaults[name])]
            given = read_flags(TrainConfig, "esper", ["--" + alias.replace("_", "-"), *words])
            assert given == {name: switch or defaults[name]}


def test_the_same_value_may_be_given_twice() -> None:
    given = read_flags(TrainConfig, "esper", ["--rounds", "2", "--episodes=2"])
    assert given == {"rounds": 2}


COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
$(complete -p esper | sed -E 's/.*-F ([^ ]+).*/\\1/') esper "${!#}" 2> /dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    """The file that bash sources."""
    path = tmp_path_factory.mktemp("completion") / "esper"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert esper(["--completion", "bash"]) == 0
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tr"], {"train"}),
        (["train", "im"], {"impala", "imitation"}),
        (["train", "ppo", "--group-b"], {"--group-baseline"}),
        (["grow", "--max-p"], {"--max-parameters"}),
    ],
)
def test_bash_offers_commands_and_flags(script: Path, words: list[str], offered: set[str]) -> None:
    done = ran(["bash", "-c", COMPLETE, "bash", str(script), "esper", *words])
    assert done.returncode == 0, done.stderr
    assert {word.strip() for word in done.stdout.split()} == offered


def test_every_command_completes() -> None:
    assert all(arguments_of(command) for command in COMMANDS)
    assert set(arguments_of("train")) == {*algorithms(), *CONTROLS}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_knows_the_flags(shell: str, capsys) -> None:
    assert esper(["--completion", shell]) == 0
    assert "group-baseline" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["bsh"], ["bash", "zsh"]])
def test_another_shell_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="completion: esper --completion takes the name"):
        esper(["--completion", *words])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rounds"], "--rounds: must be a whole number, got nothing"),
        (["--rounds", "a b"], "--rounds: must be a whole number, got 'a b'"),
        (["--rounds="], "--rounds: must be a whole number, got ''"),
        (["--rounds", "1", "2"], "--rounds: must be a whole number, got 1 2"),
        (["--record", "1"], "--record: takes no value, got '1'; write --record alone"),
        (["--slots"], "--slots: must be a list of names, got nothing"),
    ],
)
def test_a_refusal_shows_what_was_given(words: list[str], says: str, capsys) -> None:
    assert refusal(capsys, esper, "train", "ppo", *words) == f"esper: {says}\n"


def test_the_installed_command_runs_esper(monkeypatch) -> None:
    commands: list[object] = []
    monkeypatch.setattr(main, "run_command", commands.append)
    main.main()
    assert commands == [esper]


@pytest.mark.parametrize("flag", former_names.FLAGS)
def test_a_flag_of_the_prior_system_is_answered_by_ours(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    line = refusal(capsys, esper, "train", "ppo", f"--{flag}", "x")
    assert line == f"esper: --{flag}: a flag of the prior system; {former_names.FLAGS[flag]}\n"


@pytest.mark.parametrize("task", former_names.TASKS)
def test_a_task_of_the_prior_system_is_answered_by_ours(
    capsys: pytest.CaptureFixture[str], task: str
) -> None:
    line = refusal(capsys, esper, "train", "ppo", "--task", task)
    nearest = former_names.TASKS[task]
    assert line.endswith(f"a task of the prior system; {nearest!r} is the nearest\n")
    assert nearest in TASKS


def test_events_named_in_the_page_about_the_prior_system_exist() -> None:
    texts = " ".join(former_names.EVENTS.values())
    assert set(re.findall("[A-Z_]{6,}", texts)) <= set(EVENTS)


@pytest.mark.parametrize("event", former_names.EVENTS)
def test_a_query_of_an_event_of_the_prior_system_is_answered_by_ours(
    capsys: pytest.CaptureFixture[str], event: str
) -> None:
    sql = f"SELECT * FROM {event.lower()}"
    line = refusal(capsys, esper, "query", str(RECORDED / "healthy"), sql)
    assert line.endswith(f"; {event} of the prior system: {former_names.EVENTS[event]}\n")
