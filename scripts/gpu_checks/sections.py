"""The sections of the check, in order."""

from gpu_checks import (
    commands,
    convolutions,
    facts,
    gpu_tests,
    head_gradients,
    launches,
    loops,
    memory,
    mixed_precision,
    policy_updates,
    streaming,
    synchronisations,
    telemetry_cost,
    ticket,
)
from gpu_checks.section import Section

TYRO, SANCTUM, PYTEST = ("tyro",), ("tyro", "textual", "textual_plotext"), ("pytest", "hypothesis")
named, accuracy = gpu_tests.measure_ticket, mixed_precision.measure_accuracy
SECTIONS = (
    Section("ticket", "The ticket's command", 150, ticket.measure, ticket.page, SANCTUM, False),
    Section("named", "The ticket's tests", 90, named, gpu_tests.page, PYTEST, False),
    Section("streaming", "Streamed images", 15, streaming.measure, streaming.page),
    Section("commands", "Other commands", 150, commands.measure, commands.page, TYRO, False),
    Section("tests", "Tests on the device", 150, gpu_tests.measure, gpu_tests.page, PYTEST, False),
    Section("waits", "Waits", 20, synchronisations.measure, synchronisations.page, timed=False),
    Section("launches", "Launches", 60, launches.measure, launches.page, timed=False),
    Section("heads", "Gradients", 40, head_gradients.measure, head_gradients.page, timed=False),
    Section("accuracy", "Accuracy", 90, accuracy, mixed_precision.accuracy_page, timed=False),
    Section("facts", "The machine", 15, facts.measure, facts.page),
    Section("loops", "Whole training loops", 75, loops.measure, loops.page),
    Section("convolutions", "Convolutions", 20, convolutions.measure, convolutions.page),
    Section("amp", "Mixed precision", 35, mixed_precision.measure, mixed_precision.page),
    Section("telemetry", "Telemetry", 20, telemetry_cost.measure, telemetry_cost.page),
    Section("updates", "Update of the policy", 25, policy_updates.measure, policy_updates.page),
    Section("memory", "Memory", 20, memory.measure, memory.page),
)
"""The ticket first. What times nothing may run at the same time; see ``in_stages``."""
NAMES = tuple(section.name for section in SECTIONS)
