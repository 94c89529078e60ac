"""The sections of the check, in order."""

from gpu_checks import (
    convolutions,
    facts,
    gpu_tests,
    head_gradients,
    launches,
    loops,
    memory,
    mixed_precision,
    policy_updates,
    synchronisations,
    telemetry_cost,
)
from gpu_checks.section import Section

SECTIONS = (
    Section("facts", "The machine", 25, facts.measure, facts.page),
    Section("tests", "Tests on the device", 110, gpu_tests.measure, gpu_tests.page),
    Section("waits", "Waits for the device", 20, synchronisations.measure, synchronisations.page),
    Section("launches", "Launches", 30, launches.measure, launches.page),
    Section("loops", "Whole training loops", 115, loops.measure, loops.page),
    Section("convolutions", "Convolutions", 40, convolutions.measure, convolutions.page),
    Section("amp", "Mixed precision", 80, mixed_precision.measure, mixed_precision.page),
    Section("telemetry", "Telemetry", 30, telemetry_cost.measure, telemetry_cost.page),
    Section("updates", "Update of the policy", 25, policy_updates.measure, policy_updates.page),
    Section("memory", "Memory", 25, memory.measure, memory.page),
    Section("heads", "Gradients of the heads", 20, head_gradients.measure, head_gradients.page),
)
"""What tells most comes first; together they take less than nine minutes."""
NAMES = tuple(section.name for section in SECTIONS)
