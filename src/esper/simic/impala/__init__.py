"""IMPALA: learning by V-trace from the rollouts of an older policy."""
