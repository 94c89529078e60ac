"""The native backend: one environment's whole epoch on one core, in C++ that is built on first use.

``build`` compiles and caches the library, ``interface`` mirrors its structures, ``backend`` hands
the stack over. The C++ is in ``src``; ``worker.h`` is where to start reading.
"""
