"""A search for the valid input on which an engine and PyTorch differ most.

Errors grow if one key outweighs all others in a softmax, if a sum has many equal terms, and at the
edges of blocks. So the search begins with runs, repeated patterns, the tokens whose embeddings
have the largest and the smallest norms, and those that make values of the model largest. Then it
changes the worst inputs further.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from aftexport.bundle.golden import Array, Case
from aftexport.bundle.manifest import Manifest
from aftexport.engines import Engine
from aftexport.extra_inputs import sample_values
from aftexport.parity.comparison import compare
from aftexport.system.onnx_files import read_model
from aftexport.verify.documents import as_inputs, random_document

MAX_DOCUMENT_TOKENS = 1024
"""The maximum tokens of a tried document."""
_EXTREME = 8
_KEPT = 4
_LENGTHS = (
    1,
    2,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    129,
    255,
    256,
    257,
    511,
    513,
    MAX_DOCUMENT_TOKENS,
)
"""Lengths around the block sizes of kernels and bodies."""
_MAX_DOCUMENTS = 3

Batch = list[Array]
"""A batch of documents, ids ``[tokens]`` or features ``[tokens, features]``."""


class Search:
    """A search for the worst input, with the same result each time.

    ``token_norms`` ``[vocab]`` are the norms of the embeddings. The ``unusual`` ids are tried
    first.
    """

    def __init__(
        self,
        manifest: Manifest,
        engine: Engine,
        reference: Engine,
        token_norms: NDArray[np.float64] | None,
        unusual: Sequence[int] = (),
    ) -> None:
        self._manifest = manifest
        self._engine = engine
        self._reference = reference
        self._generator = np.random.default_rng(0)
        self._unusual = np.array(unusual[:_EXTREME], np.int64)
        self._extreme = _extreme_tokens(manifest, token_norms, self._generator)
        if unusual:
            self._extreme = np.union1d(self._extreme, self._unusual)
        self._max_tokens = min(MAX_DOCUMENT_TOKENS, manifest.max_tokens or MAX_DOCUMENT_TOKENS)

    def run(self, evaluations: int, advance: Callable[[], None] = lambda: None) -> Case:
        """Return the case with the largest error, with the output of the reference."""
        kept: list[tuple[float, int, Batch, Case]] = []
        for number in range(evaluations):
            # A quarter of the inputs are new, so that the search leaves local maxima.
            if number < len(self._unusual):
                batch = [_repeated(self._unusual[number, None], self._max_tokens)]
            elif number < len(self._unusual) + _KEPT or number % 4 == 0:
                batch = self._fresh()
            else:
                batch = self._changed(kept[int(self._generator.integers(len(kept)))][2])
            error, case = self._measure(batch)
            kept.append((-error, number, batch, case))
            kept = sorted(kept, key=lambda entry: entry[:2])[:_KEPT]
            advance()
        return kept[0][3]

    def _measure(self, batch: Batch) -> tuple[float, Case]:
        extras = [
            sample_values(self._manifest.extra_inputs, self._generator, len(document))
            for document in batch
        ]
        inputs = as_inputs(batch, self._manifest, extras)
        case = Case("found by the search", "model", inputs, self._reference.run(inputs))
        results = compare(case, self._engine.run(inputs), self._manifest.precision)
        return max(result.error for result in results), case

    def _fresh(self) -> Batch:
        count = 1
        if "lengths" in self._manifest.inputs:
            count = int(self._generator.integers(1, _MAX_DOCUMENTS + 1))
        # A model without lengths does not support padding.
        return [self._document(self._length()) for _ in range(count)]

    def _document(self, length: int) -> Array:
        kinds: Sequence[Callable[[int], Array]] = (
            lambda n: random_document(n, self._manifest, self._generator),
            lambda n: _repeated(self._token()[None], n),
            lambda n: _repeated(np.stack([self._token(), self._token()]), n),
            lambda n: self._generator.choice(self._extreme, n),
            lambda n: np.repeat(self._generator.choice(self._extreme, -(-n // 64)), 64, 0)[:n],
        )
        return kinds[int(self._generator.integers(len(kinds)))](length)

    def _changed(self, batch: Batch) -> Batch:
        changed = [document.copy() for document in batch]
        index = int(self._generator.integers(len(changed)))
        document = changed[index]
        start, end = sorted(self._generator.integers(0, len(document) + 1, 2))
        match int(self._generator.integers(5)):
            case 0:  # a run
                document[start:end] = self._token()
            case 1:  # a single token
                document[int(self._generator.integers(len(document)))] = self._token()
            case 2:  # another order
                document[start:end] = document[start:end][::-1].copy()
            case 3:  # a repeated part
                document = np.concatenate([document, document[start:end]])[: self._max_tokens]
            case _:  # another length
                document = _repeated(document, self._length())
        changed[index] = document
        return changed

    def _token(self) -> Array:
        if self._generator.random() < 0.5:
            return np.asarray(self._generator.choice(self._extreme))
        return np.asarray(random_document(1, self._manifest, self._generator)[0])

    def _length(self) -> int:
        return min(int(self._generator.choice(_LENGTHS)), self._max_tokens)


def _repeated(tokens: Array, count: int) -> Array:
    """Return ``count`` tokens, the given ones again and again."""
    return tokens[np.arange(count) % len(tokens)]


def _extreme_tokens(
    manifest: Manifest, norms: NDArray[np.float64] | None, generator: np.random.Generator
) -> Array:
    """Return the ids with the largest and smallest embeddings, or features of such norms."""
    if manifest.features is not None:
        tokens = random_document(2 * _EXTREME, manifest, generator)
        scales = np.repeat(np.array([10, 0.01], np.float32), _EXTREME)[:, None]
        return np.concatenate([np.asarray(tokens, np.float32) * scales, 0 * tokens[:1]])
    count = manifest.vocab_size or 0
    order = np.array([*range(min(_EXTREME, count)), *range(max(0, count - _EXTREME), count)])
    if norms is not None:
        order = np.argsort(norms[:count], kind="stable")
    return np.unique(np.concatenate([order[:_EXTREME], order[-_EXTREME:]]))


def token_norms(model: Path) -> NDArray[np.float64] | None:
    """Return the norm of each row of the embedding of ``input_ids``; None without an embedding."""
    graph = read_model(model).graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Gather" and node.input[1] == "input_ids" and node.input[0] in weights:
            table = onnx.numpy_helper.to_array(weights[node.input[0]]).astype(np.float64)
            norms: NDArray[np.float64] = np.linalg.norm(table, axis=1)
            return norms
    return None
