"""The formulas that tests compare with, in float64: one of each in NumPy, and one in C++.

Nothing here is shared with the packages. ``mechanisms.py`` and ``mechanisms.h`` have the attention
mechanisms, ``layer_norm.py`` the norm of the encoder.
"""
