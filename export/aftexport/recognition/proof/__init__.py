"""Comparison of a rewrite with the original in float64 on adversarial inputs.

The compared part of the graph lies between the value of a formula and the tensors at which the
formula ends. Those tensors get ordinary, large, tiny and constant numbers, one entry that
dominates, entries of a batch that are many magnitudes apart, and numbers beyond any clamp.
"""
