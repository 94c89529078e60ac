"""SQL of the tables that queries read: one per kind of event, and views that join them.

The event schema declares the column types, so a number is a DOUBLE whether it was written as a
number or as the text ``NaN``, and a missing value is NULL.
"""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from esper.leyline.actions import BLUEPRINTS, CHOICES, HEADS, RELEVANT_HEADS, Op
from esper.leyline.events import EVENTS, POINTS, EpisodeOutcome, EpochCompleted, Event
from esper.leyline.metrics import METRICS
from esper.leyline.stages import Stage

VIEWS: Final = (
    "runs",
    "updates",
    "steps",
    "decisions",
    "rewards",
    "seeds",
    "episodes",
    "anomalies",
)
"""Views that join events and show ops, stages and blueprints by name. Each kind of event also has a
table (``epoch_completed`` and so on), with one row per event."""


def sql_literal(value: str) -> str:
    """A string literal of SQL."""
    return "'" + value.replace("'", "''") + "'"


def structure(kind: type[Event]) -> dict[str, Any]:
    """Return the columns of an event in the form that DuckDB's ``from_json`` takes."""
    return {field.name: _column(field.type) for field in msgspec.structs.fields(kind)}


def _column(kind: Any) -> Any:
    return _of_info(msgspec.inspect.type_info(kind))


def _of_info(info: msgspec.inspect.Type) -> Any:
    match info:
        case msgspec.inspect.ListType():
            return [_of_info(info.item_type)]
        case msgspec.inspect.DictType():
            return f"MAP(VARCHAR, {_of_info(info.value_type)})"
        case msgspec.inspect.UnionType():
            # `Number` is a float or a string; an optional field is a value or null.
            parts = [_of_info(part) for part in info.types]
            return next(
                part for part in ("DOUBLE", "BIGINT", "VARCHAR", "BOOLEAN") if part in parts
            )
    names = {"Int": "BIGINT", "Float": "DOUBLE", "Bool": "BOOLEAN", "Str": "VARCHAR"}
    names |= {"Literal": "VARCHAR", "None": "NULL"}
    return names[type(info).__name__.removesuffix("Type")]


def event_table(name: str) -> str:
    """Return the SQL of the table of one kind of event over its lines."""
    kind = EVENTS[name]
    spec = msgspec.json.encode(structure(kind)).decode()
    return (
        f"SELECT run, event.* FROM (SELECT run, from_json(data, '{spec}') AS event "
        f"FROM event_lines WHERE event_type = '{name}')"
    )


def metric_column(metric: str) -> str:
    """Return the column name of a metric: ``_`` replaces characters that would need quotes."""
    return "".join(c if c.isalnum() else "_" for c in metric)


def view_definitions(names: Iterable[str] = ()) -> dict[str, str]:
    """Return the SQL of each view over the tables of events.

    Args:
        names: metrics that the updates report besides those of ``leyline.metrics``.
    """
    metrics = dict.fromkeys([*METRICS, *sorted(names)])
    columns = {metric_column(m): m for m in metrics if metric_column(m) not in _KEYS}
    selection = ", ".join(f'{_metric_value(m)} AS "{column}"' for column, m in columns.items())
    return {
        "updates": f'SELECT run, round, "update", time, {selection} FROM {_UPDATES}',
        "steps": _STEPS,
        "decisions": _DECISIONS,
        "rewards": _REWARDS,
        "seeds": _SEEDS,
        "episodes": _EPISODES,
        "anomalies": _ANOMALIES,
    }


_UPDATES = "(SELECT * FROM ppo_update_completed UNION ALL SELECT * FROM policy_update_completed)"
_KEYS = ("run", "round", "update", "time")


def _metric_value(metric: str) -> str:
    return f"metrics[{sql_literal(metric)}]"


def _texts(names: Iterable[str]) -> str:
    return "[" + ", ".join(f"'{name}'" for name in names) + "]"


def _name_at(index: str, names: Iterable[object]) -> str:
    """SQL of the element ``index`` (from 0) of a constant list."""
    items = [f"'{name}'" if isinstance(name, str) else str(name) for name in names]
    return f"[{', '.join(items)}][{index} + 1]"


def _lists(kind: type[Event], without: Iterable[str] = ()) -> list[str]:
    """Fields that hold one plain value per environment."""
    return [
        name
        for name, column in structure(kind).items()
        if isinstance(column, list) and isinstance(column[0], str) and name not in without
    ]


def _unnest(names: Iterable[str]) -> str:
    return ", ".join(f"unnest({name}) AS {name}" for name in names)


_OPS = [op.name for op in Op]
_STAGES = [next((s.name for s in Stage if s == i), "") for i in range(max(Stage) + 1)]
_BLUEPRINT_NAMES = f"coalesce(any_value(nullif(blueprints, [])), {_texts(BLUEPRINTS)})"

TASKS = """
SELECT run, round, any_value(task) AS task FROM (
    SELECT run, round, task FROM episode_started
    UNION ALL SELECT run, round, task FROM episode_outcome
) GROUP BY run, round"""
"""The task of each environment, one list per round."""

WORDS = f"""
SELECT run, {_BLUEPRINT_NAMES} AS names, any_value(tasks) AS tasks, any_value(slots) AS slots
FROM training_started GROUP BY run"""
"""The names of blueprints, tasks and slots of each run."""

METRIC_NAMES = "SELECT DISTINCT unnest(map_keys(metrics)) FROM ppo_update_completed"
"""The names of the metrics that updates report."""

_STEP_VALUES = _lists(EpochCompleted, ("op", "slot", "success"))
_PARALLEL = ("op", "slot", "success", "stage", "blueprint", "alpha")

_STEPS = f"""
SELECT run, round, step, environment, task[environment + 1] AS task,
    {", ".join(_STEP_VALUES)},
    {_name_at("op", _OPS)} AS op, slot, success,
    list_transform(stage, lambda s: {_texts(_STAGES)}[s + 1]) AS stages,
    list_transform(blueprint, lambda b: names[b + 1]) AS blueprints,
    alpha AS alphas, time
FROM (
    SELECT e.run, e.round, e.step, e.time, t.task, w.names,
        unnest(range(len(e.reward))) AS environment,
        {", ".join(f"unnest(e.{name}) AS {name}" for name in (*_STEP_VALUES, *_PARALLEL))}
    FROM epoch_completed e
    LEFT JOIN tasks_of_rounds t USING (run, round)
    LEFT JOIN words w ON w.run = e.run
)"""


def _head(head: str) -> str:
    """SQL of a head's choice as a value; NULL where the op does not use the head."""
    ops = [op.value for op in Op if head in RELEVANT_HEADS[op]]
    index = f"actions[{HEADS.index(head) + 1}]"
    value = _name_at(index, CHOICES[head]) if head in CHOICES else f"names[{index} + 1]"
    if head == "alpha_target":
        value += "::DOUBLE"
    return f"CASE WHEN op IN ({', '.join(map(str, ops))}) THEN {value} END AS {head}"


_DECISIONS = f"""
SELECT x.run, x.round, step, environment, t.task[environment + 1] AS task,
    {_name_at("op", _OPS)} AS op,
    CASE WHEN op != {Op.WAIT.value} THEN slot END AS slot,
    {", ".join(_head(head) for head in HEADS[2:])},
    success,
    list_transform(legal_ops, lambda o: {_texts(_OPS)}[o + 1]) AS legal_ops,
    op_probability[op + 1] AS op_probability,
    op_probability AS op_probabilities, log_prob, "value", time
FROM (
    SELECT e.run, e.round, e.step, e.time,
        unnest(range(len(e.op))) AS environment,
        unnest(e.op)::BIGINT AS op, unnest(e.slot)::BIGINT AS slot, unnest(e.success) AS success,
        unnest(d.actions) AS actions, unnest(d.legal_ops) AS legal_ops,
        unnest(d.op_probability) AS op_probability,
        unnest(d.log_prob) AS log_prob, unnest(d."value") AS "value"
    FROM (
        SELECT run, round, step, time, try_cast(op AS SMALLINT[]) AS op,
            try_cast(slot AS SMALLINT[]) AS slot, success
        FROM epoch_completed
    ) e
    LEFT JOIN decisions_made d USING (run, round, step)
) x
LEFT JOIN tasks_of_rounds t ON t.run = x.run AND t.round = x.round
LEFT JOIN words w ON w.run = x.run"""
"""One side of the join of steps and their decisions is held in memory, so it is kept narrow, and
what belongs to a round joins afterwards."""

_REWARDS = """
SELECT run, round, step, environment, task, reward,
    sum(reward) OVER (PARTITION BY run, round, environment ORDER BY step) AS return_so_far,
    expected_accuracy, twin_expected_accuracy, added_parameters
FROM steps"""

_SEEDS = """
SELECT s.run, s.round, s.step, s.environment, s.task,
    s.slot, w.slots[list_position(w.tasks, s.task)][s.slot + 1] AS slot_name,
    lower(s.stage) AS event, s.blueprint, s.previous, s.stage, f.parameters, s.time
FROM (
    SELECT c.* EXCLUDE (task), task[environment + 1] AS task FROM (
        SELECT e.run, e.round, e.step, e.time, t.task, unnest(e.environment) AS environment,
            unnest(e.slot) AS slot, unnest(e.blueprint) AS blueprint,
            unnest(e.previous) AS previous, unnest(e.stage) AS stage
        FROM seed_stage_changed e LEFT JOIN tasks_of_rounds t USING (run, round)
    ) c
) s
LEFT JOIN (
    SELECT run, round, step, 'FOSSILISED' AS stage, unnest(environment) AS environment,
        unnest(slot) AS slot, unnest(parameters) AS parameters
    FROM seed_fossilized
) f USING (run, round, step, environment, slot, stage)
LEFT JOIN words w ON w.run = s.run"""

_OUTCOMES = _lists(EpisodeOutcome)
_EPISODES = f"""
SELECT *, {POINTS} * (test_utility - twin_test_utility) AS gain,
    {POINTS} * (utility - twin_utility) AS validation_gain
FROM (
    SELECT run, round, unnest(range(len(task))) AS environment, {_unnest(_OUTCOMES)}, time
    FROM episode_outcome
)"""

_ANOMALIES = """
SELECT run, round, step, NULL::BIGINT AS environment, kind, metric, "value", threshold, message,
    amp_enabled, amp_dtype, amp_scale, amp_policy_dtype, amp_policy_scale, time
FROM anomaly_detected
UNION ALL
SELECT g.run, g.round, g.step, g.environment, 'governor_rollback', NULL, NULL, NULL, g.reason,
    s.amp_enabled, s.amp_dtype, s.amp_scale, s.amp_policy_dtype, s.amp_policy_scale, g.time
FROM (
    SELECT run, round, step, time, unnest(environment) AS environment, unnest(reason) AS reason
    FROM governor_rollback
) g
LEFT JOIN analytics_snapshot s USING (run, round)"""
