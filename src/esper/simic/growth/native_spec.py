"""Constants passed to the native library once: tables, thresholds, values of enumerations."""

from math import log, pi
from typing import Any

import torch
from torch import Tensor

from esper.kasmina import gates, lifecycle
from esper.kasmina.lifecycle import ALPHA_TOLERANCE, Rules
from esper.kasmina.seeds import AlphaMode
from esper.kasmina.transfer import CPU
from esper.leyline.actions import BLUEPRINTS, HEADS, Curve, Op, Style
from esper.leyline.stages import COMPUTING, DEVELOPING, LIVING, PRUNABLE, STAGE_COUNT, Stage
from esper.native.structures import Struct
from esper.simic.growth.native_blocks import CALLS
from esper.tamiyo.policy import features
from esper.tamiyo.policy.features import HOST_FEATURES, SLOT_FEATURES
from esper.tolaria import governor as governor_module
from esper.tolaria import health
from esper.tolaria.engine import Engine
from esper.tolaria.governor import DivergenceDetector
from esper.tolaria.results import SLOT_MEASURES


def governor_limits(
    governor: DivergenceDetector, spec: Struct, shape: tuple[int, int]
) -> dict[str, Any]:
    """The fields of ``CheckCall`` that describe a governor."""
    assert governor.classes is not None, "native hosts have classes"
    limits, guessing = governor.limits, log(governor.classes)
    return {
        "rows": shape[0],
        "slots": shape[1],
        "history": governor_module.HISTORY,
        "least_history": governor_module.MIN_HISTORY,
        "strikes_allowed": governor_module.STRIKES,
        "guessing": guessing,
        "collapse_mean": limits.collapse_mean * guessing,
        "collapse_band": limits.collapse_band * guessing,
        "collapse_expected": limits.collapse_expected / governor.classes,
        "runaway_loss": limits.runaway_loss,
        "runaway_deviations": limits.runaway_deviations,
        "runaway_factor": limits.runaway_factor,
        "reasons": _numbers(CALLS.Reasons, governor_module.Reason),
        "computes": spec.computing,
    }


def step_spec(engine: Engine, count: int, rules: Rules, kinds: Tensor) -> Struct:
    """The ``StepSpec`` of a shard; keeps its tables alive."""
    slots, host = engine.slots, engine.host.parameter_count
    tables = _tables(engine, kinds)
    spec: Struct = CALLS.StepSpec(
        rows=len(engine.rows),
        environments=count,
        slots=len(slots),
        heads=len(HEADS),
        ops=len(Op),
        blueprints=len(BLUEPRINTS),
        styles=len(Style),
        stage_count=STAGE_COUNT,
        stage_features=tables["stage_table"].shape[1],
        style_features=tables["style_table"].shape[1],
        op_features=tables["op_table"].shape[1],
        host_width=len(HOST_FEATURES),
        slot_width=len(SLOT_FEATURES),
        slot_measures=len(SLOT_MEASURES),
        active_share=SLOT_MEASURES.index("active_share"),
        history=features.HISTORY,
        head=CALLS.Heads(**{name: HEADS.index(name) for name in CALLS.Heads.names}),
        op=_numbers(CALLS.Ops, Op),
        stage=_numbers(CALLS.Stages, Stage),
        mode=_numbers(CALLS.Modes, AlphaMode),
        curve=_numbers(CALLS.Curves, Curve),
        rules=CALLS.Rules(**{name: int(getattr(rules, name)) for name in CALLS.Rules.names}),
        **_limits(),
        host_root=host**0.5,
        host_parameters=host,
        log_host=features.log_size(host),
        most_seeds=features.most_seeds(rules.max_seeds, len(slots)),
        episode_length=engine.episode_length,
        **{name: table.data_ptr() for name, table in tables.items()},
    )
    spec.kept = tables
    return spec


def _limits() -> dict[str, float]:
    """Thresholds and weights, by the names of ``StepSpec``."""
    return {
        "tolerance": ALPHA_TOLERANCE,
        "full": 1.0 - ALPHA_TOLERANCE,
        "healthy": gates.HEALTHY,
        "least_improvement": gates.MIN_IMPROVEMENT,
        "least_gradient_ratio": gates.MIN_GRADIENT_RATIO,
        "least_contribution": gates.MIN_CONTRIBUTION,
        "vanishing_norm": health.VANISHING_NORM,
        "exploding_norm": health.EXPLODING_NORM,
        "vanishing_weight": health.VANISHING_WEIGHT,
        "exploding_weight": health.EXPLODING_WEIGHT,
        "velocity_kept": health.VELOCITY_KEPT,
        "velocity_new": 1.0 - health.VELOCITY_KEPT,
        "ratio_kept": health.RATIO_KEPT,
        "ratio_new": 1.0 - health.RATIO_KEPT,
        "ratio_floor": health.RATIO_FLOOR,
        "pi": pi,
        "points": features.SCORE_FEATURE_SCALE,
        "infinite_norm": features.INFINITE_NORM,
        "least_measure": features.MIN_MEASURE,
        "most_measure": features.MAX_MEASURE,
        "measure_unit": features.MEASURE_UNIT,
    }


def _tables(engine: Engine, kinds: Tensor) -> dict[str, Tensor]:
    """The lookup tables, by the names of ``StepSpec``."""
    slots = engine.slots
    looked_up = {
        "last_option": lifecycle.last_options(len(slots), CPU),
        "moved": lifecycle.MOVED.on(CPU),
        "first_curve": lifecycle.FIRST_CURVE.on(CPU),
        "targets": lifecycle.TARGETS.on(CPU),
        "speeds": lifecycle.SPEEDS.on(CPU),
        "tempos": lifecycle.TEMPOS.on(CPU),
        "sigmoids": lifecycle.sigmoids(CPU),
        "living": _members(LIVING),
        "computing": _members(COMPUTING),
        "developing": _members(DEVELOPING),
        "prunable": _members(PRUNABLE),
        "blended": _members(gates.BLENDING_STAGES),
        "kinds": kinds,
        "parameters": engine.parameter_table,
        "tensor_counts": torch.tensor([slot.tensor_counts for slot in slots]),
        "tensors": torch.tensor([slot.segment_count for slot in slots]),
        "stage_table": features.STAGES.on(CPU),
        "share_table": features.SHARES.on(CPU),
        "ramp_table": features.RAMPS.on(CPU),
        "style_table": features.STYLES.on(CPU),
        "op_table": features.OPS.on(CPU),
        "place": torch.tensor(features.places(slots), dtype=torch.float32),
    }
    return {name: table.contiguous() for name, table in looked_up.items()}


def _members(stages: tuple[Stage, ...]) -> Tensor:
    """Whether each ``Stage`` is one of ``stages``, bool ``[STAGE_COUNT]``."""
    return torch.tensor([number in stages for number in range(STAGE_COUNT)])


def _numbers(structure: type[Struct], enumeration: Any) -> Struct:
    """A structure with the values of the enumeration's members, matched by name."""
    return structure(**{name: int(enumeration[name.upper()]) for name in structure.names})
