"""Offline learning: policies from the records of other runs, without acting."""
