"""The contract of every exported model: its inputs, its outputs and their limits."""

from collections.abc import Collection

MAX_TOKENS = 1 << 20
"""The maximum length of a document in a graph, for models without a bound of their own.

A bound keeps the exporter's shape arithmetic exact.
"""
DEFAULT_OPSET = 20
"""The opset of the standard operators."""
MAX_VOCABULARY = 1 << 26
"""The maximum number of token ids: a table with one float for each has 256 MiB."""
MAX_FEATURES = 1 << 16
"""The maximum number of features of a token."""
IDS = "input_ids"
"""The input with token ids, int64 ``[batch, tokens]``."""
FEATURES = "input_features"
"""The input with a vector for each token, float32 ``[batch, tokens, features]``."""
LENGTHS = "lengths"
"""The input with the number of tokens of each document, int64 ``[batch]``."""
AXES: dict[str, dict[int, str]] = {
    IDS: {0: "batch", 1: "tokens"},
    FEATURES: {0: "batch", 1: "tokens"},
    LENGTHS: {0: "batch"},
}
"""The names of the dynamic axes of each input."""
INPUTS = ((IDS, LENGTHS), (IDS,), (FEATURES, LENGTHS), (FEATURES,))
"""The inputs that a model may have, in their order."""
LOGITS = "logits"
"""The name of the output of a forward that returns one tensor."""
EVIDENCE = "evidence"
"""The output with each token's contribution to the largest logit, float32 ``[batch, tokens]``."""
EXPLAINED = "evidence_explained"
"""The constant with the numbers of the logits to explain, int64 ``[1, 1]``; see ``largest``.

An engine may take ``[batch, chosen]`` instead. The output ``evidence`` is then
``[batch, chosen * tokens]``.
"""


def largest(head: int) -> int:
    """Return the number that stands for the largest logit of a head, by the head's index."""
    return -1 - head


def main_input(names: Collection[str]) -> str:
    """Return the input with the tokens of the documents, ``IDS`` or ``FEATURES``."""
    return FEATURES if FEATURES in names else IDS
