"""The training loops: rounds of episodes, updates, telemetry and checkpoints."""
