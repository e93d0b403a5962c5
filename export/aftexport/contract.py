"""The contract of every exported model: its inputs, its outputs and their limits."""

MAX_TOKENS = 1 << 20
"""The longest document a graph is traced for where the model states no bound.

A bound keeps the exporter's shape arithmetic exact.
"""
MAX_VOCABULARY = 1 << 26
"""A table of one float for each id of a larger one would have over 256 MiB."""
AXES: dict[str, dict[int, str]] = {
    "input_ids": {0: "batch", 1: "tokens"},
    "lengths": {0: "batch"},
}
"""The names of the axes of each input."""
EVIDENCE = "evidence"
"""The output that says what each token adds to the largest logit, float32 ``[batch, tokens]``."""
SCORES = "softmax over exclusive labels"
"""The meaning of every score that is served."""
MIN_LABELS = 2
ONE_LABEL = "scores are a softmax over exclusive labels, which is 1.0 for a single label"
GIVE_TWO_LABELS = (
    "Export a model with a logit for each of two or more labels; for a binary logit x [batch, 1], "
    "return torch.cat([torch.zeros_like(x), x], 1)."
)
