"""Esper's laboratory: what measures Esper's claims, and what no user's training needs.

It draws hosts whose circumstances only a look at them can tell (``families``), plays policies and
controls on them (``play``, ``controls``), sorts these into the rungs of a ladder (``ladder``), and
shows what the ladder says (``ladder_steps``, ``ladder_figures``). ``describe`` tells whether
there is anything to learn on a task.

It imports ``esper``, which does not import it but finds its parts by their entry points, see
``esper.leyline.laboratory``.
"""
