"""The bookkeeping of a step in C++: lifecycle, gates, signals, governor and features of all rows.

``interface`` mirrors the library's structures, ``functions`` hands tensors over. The C++ is in
``src``; ``pass.h`` is where to start reading.
"""
