"""The bookkeeping of a step in C++: lifecycle, gates, signals, governor and features of all rows.

``interface`` mirrors the library's structures, ``spec`` fills in what holds for a whole shard,
``blocks`` keeps seeds as the library reads them and ``functions`` hands tensors over. The C++ is in
``src``; ``pass.h`` is where to start reading.
"""
