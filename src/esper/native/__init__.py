"""The native library: hosts, policy and bookkeeping of a step in C++, behind one door.

``build`` compiles ``src`` or finds what was compiled, ``structures`` reads the structures of each
``calls.h``, ``library`` loads the library and hands out functions, ``pointers`` passes tensors. Who
calls: ``tolaria.backends.native``, ``tamiyo.policy.native_network``, ``simic.growth.native_step``.
"""
