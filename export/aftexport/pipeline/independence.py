"""The check that a document's scores do not depend on other documents of the same run.

A server joins documents of several clients in one run, right-padded to the longest. The scores are
exact only if the model computes each row of a batch separately.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.golden import Array, random_tokens
from aftexport.capture.model_spec import InputSpec
from aftexport.engines import Engine
from aftexport.extra_inputs import ExtraInput, stacked, values_of
from aftexport.parity.comparison import Differences
from aftexport.system.contract import main_input

DOUBLE_BOUND = 1e-7
"""Bound of the error of a float64 reference, whose order of sums differs in a batch."""
_TOKENS = 33
_PADDED_TOKENS = 65


@dataclass(frozen=True)
class Breach:
    """A document, row ``row`` of a batch, whose scores differ between it and a batch of one.

    The error is relative to the largest score if that is above 1.
    """

    inputs: dict[str, Array]
    row: int
    error: float
    extras: tuple[ExtraInput, ...] = ()

    @property
    def is_of_padding(self) -> bool:
        """Whether the document was padded in the batch."""
        tokens = self.inputs[main_input(self.inputs)]
        return bool(self.inputs["lengths"][self.row] < tokens.shape[1])

    def alone(self) -> dict[str, Array]:
        """Return the same document as a batch of one, without padding."""
        length = int(self.inputs["lengths"][self.row])
        main = main_input(self.inputs)
        tokens = self.inputs[main][self.row : self.row + 1, :length]
        own = values_of(self.extras, self.inputs, self.row, length).batch()
        return {main: tokens, "lengths": np.array([length], np.int64), **own}


def find_breach(
    reference: Engine, spec: InputSpec, order: NDArray[np.int64] | None, *, bound: float
) -> Breach | None:
    """Return the first document whose scores depend on its batch; None if all are independent.

    Its neighbors have the ids at both ends of ``order``, from the smallest row of the embedding
    table to the largest; without it, the first and the last id.
    """
    for inputs in _batches(spec, order):
        together = reference.run(spec.in_order(inputs))
        for row in range(len(inputs["lengths"])):
            breach = Breach(inputs, row, 0.0, spec.extras)
            alone = reference.run(spec.in_order(breach.alone()))
            errors = [_error(together[name][row : row + 1], alone[name]) for name in alone]
            if (error := max(errors)) > bound:
                return replace(breach, error=error)
    return None


def _error(batched: Array, single: Array) -> float:
    """Return the error of a document's output in a batch, without the rows of its padding."""
    if single.ndim == 3:
        batched = batched[:, : single.shape[1]]
    if batched.shape != single.shape or not np.isfinite(single).all():
        return 0.0  # other checks report these
    return Differences.between(batched, single).error


def _batches(spec: InputSpec, order: NDArray[np.int64] | None) -> Iterator[dict[str, Array]]:
    """Yield batches of equal lengths, then padded ones if the model takes lengths."""
    generator = np.random.default_rng(1)
    lowest, highest = 0, (spec.vocab_size or 0) - 1
    if order is not None:
        lowest, highest = int(order[0]), int(order[-1])

    def documents(tokens: int) -> Array:
        rows = random_tokens(
            generator, (4, tokens), vocab_size=spec.vocab_size, num_features=spec.num_features
        )
        if spec.num_features is None:
            rows[1], rows[2] = highest, lowest
        else:
            rows[1] *= np.float32(10)
            rows[2] = 0
        return rows

    def batch(tokens: Array, lengths: Array) -> dict[str, Array]:
        count, length = tokens.shape[:2]
        drawn = {extra.name: extra.sample(generator, count, length) for extra in spec.extras}
        one_each = [values_of(spec.extras, drawn, i, n) for i, n in enumerate(lengths.tolist())]
        # As the server pads.
        return {spec.main: tokens, "lengths": lengths, **stacked(spec.extras, one_each, length)}

    longest = spec.max_tokens or _PADDED_TOKENS
    for tokens in (min(_TOKENS, longest), 1):
        rows = documents(tokens)
        for chosen in (rows, rows[:2]):
            yield batch(chosen, np.full(len(chosen), tokens, np.int64))
    if "lengths" in spec.names:
        tokens = min(_PADDED_TOKENS, longest)
        lengths = np.maximum([tokens // 2, tokens, 1, tokens - 1], 1).astype(np.int64)
        padded = documents(tokens)
        padded[np.arange(tokens) >= lengths[:, None]] = 0  # as the server pads
        yield batch(padded, lengths)
