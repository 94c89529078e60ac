"""The suite ``capacity``: networks of drawn width, on which policies of ``esper.grow`` are played.

``hosts`` are drawn in ``held_out``, whose data and architecture no rule has met; ``training`` grows
them, and ``ladder`` puts a policy between rules, static networks and sweeps over sizes.
"""
