"""Sanctum shows a run on the terminal, live or finished. It reads only the run directory."""
