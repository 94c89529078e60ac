"""Flags, tasks and events of the prior system, and what Esper has instead.

``docs/from-esper-lite.md`` is written from these tables.
"""

_ELSEWHERE = "put it into --config-json FILE"
_PROFILER = "use torch.profiler, or scripts/profile_hot_path_operations.py"
_WATCH = "watch with --sanctum, or write a page with esper report RUN"

FLAGS: dict[str, str] = {
    "preset": "name the task with --task, and put settings into --config-json FILE",
    "save": "every round is saved in the run directory; leave it out",
    "num-workers": "minibatches are gathered without workers; leave it out",
    "telemetry-file": "events are written to events.jsonl in the run directory; give "
    "--telemetry-dir and --name",
    "overwatch": _WATCH,
    "overwatch-port": _WATCH,
    "dashboard": _WATCH,
    "no-tui": "nothing takes the whole screen without --sanctum; leave it out",
    "ab-test": "train both, and compare them with esper report RUN RUN",
    "dual-ab": "train both, and compare them with esper report RUN RUN",
    "proof-baseline": "controls are esper train heuristic, rule, random and schedule",
    "export-karn": "esper query RUN reads all events; --format csv exports them",
    "force-compile": "--compile default compiles, with Sanctum too",
    "memory-size": "give --lstm-hidden",
    "value-warmup-batches": "give --value-warmup-steps",
    "entropy-anneal-episodes": "give --entropy-decay linear and --entropy-decay-steps",
    "min-fossilize-improvement": "give --strict-gates",
    "gpu-preload-augment": "crops and flips are computed on the device; leave it out",
    "gpu-preload-precompute-augment": "crops and flips are computed on the device; leave it out",
    "gradient-telemetry-stride": "give --telemetry-level",
    "telemetry-lifecycle-only": "give --telemetry-level minimal",
    "no-phase-profiler": "phases are not profiled; leave it out",
    "torch-profiler": _PROFILER,
    "torch-profiler-dir": _PROFILER,
    "training-config": _ELSEWHERE,
}
"""By flag without dashes: what to do instead. Aliases of settings are no part of it."""

TASKS: dict[str, str] = {
    "cifar10": "cifar_baseline",
    "cifar_blind": "cifar_impaired",
    "cifar10_deep": "cifar_scale",
    "tinystories": "text_gpt",
}
"""By task of the prior system: the one of Esper that is nearest to it."""

EVENTS: dict[str, str] = {
    "BATCH_EPOCH_COMPLETED": "EPISODE_OUTCOME, once per round, with a value per environment",
    "PLATEAU_DETECTED": "no event; `esper report` says whether a run learns, or has stopped to",
    "GRADIENT_ANOMALY": "ANOMALY_DETECTED, kinds gradient_drift and gradient_vanishing",
    "REWARD_COMPUTED": "EPOCH_COMPLETED, `reward`",
}
"""By event of the prior system: where Esper writes the same."""
