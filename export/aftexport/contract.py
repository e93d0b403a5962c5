"""The contract of every exported model: its inputs, its outputs and their limits."""

MAX_TOKENS = 1 << 20
"""The maximum length of a document in a graph, for models without a bound of their own.

A bound keeps the exporter's shape arithmetic exact.
"""
MAX_VOCABULARY = 1 << 26
"""The maximum number of token ids: a table with one float for each has 256 MiB."""
AXES: dict[str, dict[int, str]] = {
    "input_ids": {0: "batch", 1: "tokens"},
    "lengths": {0: "batch"},
}
"""The names of the axes of each input."""
LOGITS = "logits"
"""The name of the output of a forward that returns one tensor."""
EVIDENCE = "evidence"
"""The output with each token's contribution to the largest logit, float32 ``[batch, tokens]``."""
