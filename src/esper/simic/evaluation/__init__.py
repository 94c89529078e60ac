"""Evaluation of policies against controls on the same hosts, on the test split."""
