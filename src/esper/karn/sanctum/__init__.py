"""Sanctum: a run on the terminal, live or finished. It reads the run directory and nothing else."""
