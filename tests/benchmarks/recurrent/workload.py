"""One update rule at one size: its inputs and its work."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aftexport.operators.mechanisms.recurrent_linear_attention import DELTA_RULES, GATED_RULES
from aftexport.operators.torch_ops import RECURRENT_OPERATORS

OPERATOR = RECURRENT_OPERATORS["RecurrentLinearAttention"]
RULES = ("linear", "gated", "delta", "gated_delta")
Feeds = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Recurrence:
    """One update rule at one size; every document is whole.

    Attributes:
        rule: the update rule.
        batch, tokens, heads, width: the size; a head has as many channels of keys as of values.
    """

    rule: str
    batch: int
    tokens: int
    heads: int
    width: int

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of our operator."""
        given = {a.name: a.default for a in OPERATOR.attributes}
        heads = {"q_num_heads": self.heads, "kv_num_heads": self.heads}
        return given | {"update_rule": self.rule} | heads

    def feeds(self) -> Feeds:
        """Draw the inputs; keys have a norm of about 1, as in models."""
        rng = np.random.default_rng(0)
        sequence = (self.batch, self.tokens, self.heads * self.width)
        gates = (self.batch, self.tokens, self.heads)
        feeds = {
            name: rng.standard_normal(sequence, np.float32) for name in ("query", "key", "value")
        }
        feeds["key"] *= np.float32(self.width**-0.5)
        if self.rule in GATED_RULES:
            feeds["decay"] = -rng.exponential(0.1, gates).astype(np.float32)
        if self.rule in DELTA_RULES:
            feeds["beta"] = rng.uniform(size=gates).astype(np.float32)
        return feeds

    @property
    def bytes_moved(self) -> float:
        """The bytes of all inputs and of the output, each read or written once."""
        gates = (self.rule in GATED_RULES) + (self.rule in DELTA_RULES)
        return 4.0 * self.batch * self.tokens * self.heads * (4 * self.width + gates)

    @property
    def multiply_adds(self) -> float:
        """The multiply-adds of the definition, token by token, without those of the decays.

        Per token and head: the query reads the state, and the token changes it. With a delta rule,
        the key reads the state as well. A form in chunks takes more.
        """
        passes = 3 if self.rule in DELTA_RULES else 2
        return float(passes * self.batch * self.tokens * self.heads * self.width**2)
