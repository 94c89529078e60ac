"""The training loop: rounds of episodes, updates, telemetry and checkpoints."""
