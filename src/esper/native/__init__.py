"""The native library in C++: hosts, policy, and the bookkeeping of a step.

``build`` compiles ``src`` or finds a compiled library, ``structures`` reads the structures of each
``calls.h``, ``library`` loads the library and returns its functions, ``pointers`` passes tensors.
The modules ``tolaria.backends.native``, ``tamiyo.policy.native_network`` and
``simic.growth.native_step`` call it.
"""
