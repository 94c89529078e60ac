"""Leyline holds the contracts that every other package shares.

Stages of a seed's life, the action heads and which of them matter for which operation, the
configuration, the events of a run, what counts as an anomaly in them, and the one exception type
that means "the user can fix this".
It imports nothing else of Esper.
"""
