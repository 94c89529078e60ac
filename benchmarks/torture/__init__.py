"""Kills, signals, damage, full disks and odd input: what a run must survive, in numbers."""
