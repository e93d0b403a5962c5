"""A search for the valid input on which an engine and PyTorch differ most.

Errors grow where a softmax has one key that outweighs all others, where a sum has many equal
terms, and at the edges of blocks; so it begins with runs, repeated patterns and the tokens whose
embeddings are longest and shortest, and changes the worst of them on.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from aftexport.bundle.golden import Case
from aftexport.bundle.manifest import Manifest
from aftexport.engines import Engine
from aftexport.onnx_io import read_model
from aftexport.parity.comparison import compare
from aftexport.verify.documents import as_inputs

LONGEST = 1024
"""Tokens of a document that is tried."""
_EXTREME = 8
_KEPT = 4
_LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, LONGEST)
"""Around the blocks that kernels and bodies work in."""
_MOST_DOCUMENTS = 3

Batch = list[NDArray[np.int64]]
"""Documents of token ids."""


class Search:
    """Looks for the worst input; the same one every time for the same seed.

    Args:
        manifest: what the model takes.
        engine: what is judged.
        reference: what it is judged by.
        token_norms: of each token's embedding, ``[vocab]``; None where they are not known.
        seed: of the inputs that are tried.
    """

    def __init__(
        self,
        manifest: Manifest,
        engine: Engine,
        reference: Engine,
        token_norms: NDArray[np.float64] | None,
        *,
        seed: int = 0,
    ) -> None:
        self._manifest = manifest
        self._engine = engine
        self._reference = reference
        self._generator = np.random.default_rng(seed)
        count = manifest.vocab_size
        order = np.array([*range(min(_EXTREME, count)), *range(max(0, count - _EXTREME), count)])
        if token_norms is not None:
            order = np.argsort(token_norms[:count], kind="stable")
        self._extreme = np.unique(np.concatenate([order[:_EXTREME], order[-_EXTREME:]]))
        self._longest = min(LONGEST, manifest.max_tokens or LONGEST)

    def run(self, evaluations: int, advance: Callable[[], None] = lambda: None) -> Case:
        """The worst of so many inputs, with the reference's output for it.

        Args:
            evaluations: inputs to try, 1 or more.
            advance: called after each.

        Raises:
            EngineError: where the engine or the reference fails.
        """
        kept: list[tuple[float, int, Batch, Case]] = []
        for number in range(evaluations):
            # A quarter begins anew, so that the search is not caught by the first it found.
            if number < _KEPT or number % 4 == 0:
                batch = self._fresh()
            else:
                batch = self._changed(kept[int(self._generator.integers(len(kept)))][2])
            error, case = self._measure(batch)
            kept.append((-error, number, batch, case))
            kept = sorted(kept, key=lambda found: found[:2])[:_KEPT]
            advance()
        return kept[0][3]

    def _measure(self, batch: Batch) -> tuple[float, Case]:
        inputs = as_inputs(batch, self._manifest)
        expected = self._reference.run(inputs)["logits"]
        case = Case("found by the search", "model", inputs, expected)
        output = self._engine.run(inputs)["logits"]
        return compare(case, output, self._manifest.precision).error, case

    def _fresh(self) -> Batch:
        count = 1
        if "lengths" in self._manifest.inputs:
            count = int(self._generator.integers(1, _MOST_DOCUMENTS + 1))
        # Without lengths nothing may be padded.
        return [self._document(self._length()) for _ in range(count)]

    def _document(self, length: int) -> NDArray[np.int64]:
        kinds: Sequence[Callable[[int], NDArray[np.int64]]] = (
            lambda n: self._generator.integers(0, self._manifest.vocab_size, n),
            lambda n: np.full(n, self._token()),
            lambda n: np.resize([self._token(), self._token()], n),
            lambda n: self._generator.choice(self._extreme, n),
            lambda n: np.repeat(self._generator.choice(self._extreme, -(-n // 64)), 64)[:n],
        )
        return kinds[int(self._generator.integers(len(kinds)))](length).astype(np.int64)

    def _changed(self, batch: Batch) -> Batch:
        changed = [document.copy() for document in batch]
        index = int(self._generator.integers(len(changed)))
        document = changed[index]
        start, end = sorted(self._generator.integers(0, len(document) + 1, 2))
        match int(self._generator.integers(5)):
            case 0:  # a run
                document[start:end] = self._token()
            case 1:  # one token alone
                document[int(self._generator.integers(len(document)))] = self._token()
            case 2:  # another order
                document[start:end] = document[start:end][::-1].copy()
            case 3:  # longer by what is there
                document = np.concatenate([document, document[start:end]])[: self._longest]
            case _:  # another length
                document = np.resize(document, self._length())
        changed[index] = document
        return changed

    def _token(self) -> int:
        if self._generator.random() < 0.5:
            return int(self._generator.choice(self._extreme))
        return int(self._generator.integers(self._manifest.vocab_size))

    def _length(self) -> int:
        return min(int(self._generator.choice(_LENGTHS)), self._longest)


def token_norms(model: Path) -> NDArray[np.float64] | None:
    """The norm of each row of the table that ``input_ids`` are looked up in; None without one."""
    graph = read_model(model).graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Gather" and node.input[1] == "input_ids" and node.input[0] in weights:
            table = onnx.numpy_helper.to_array(weights[node.input[0]]).astype(np.float64)
            norms: NDArray[np.float64] = np.linalg.norm(table, axis=1)
            return norms
    return None
