"""Leyline holds the contracts that all other packages share.

It defines the stages of a seed, the action heads and which of them each operation uses, the
configuration, the events of a run, the kinds of anomaly, and the one exception type that means
"the user can fix this". It imports no other package of Esper.
"""
