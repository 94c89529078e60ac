"""The policy's network in C++: whole sequences forward and backward in one call each.

``interface`` mirrors the library's structures, ``network`` hands tensors over. The C++ is in
``src``; ``network.h`` is where to start reading.
"""
