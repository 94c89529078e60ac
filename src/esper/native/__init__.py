"""The native library in C++: the hosts.

``build`` compiles ``src`` or finds a compiled library, ``structures`` reads the structures of
``calls.h``, ``library`` loads the library, returns its functions and passes tensors to them.
``tolaria.backends.native`` calls it.
"""
