"""The native library in C++: hosts and policy.

``build`` compiles ``src`` or finds a compiled library, ``structures`` reads the structures of each
``calls.h``, ``library`` loads the library, returns its functions and passes tensors to them.
The modules ``tolaria.backends.native`` and ``tamiyo.policy.native_network`` call it.
"""
