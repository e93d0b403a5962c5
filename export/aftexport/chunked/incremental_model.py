"""A bundle whose documents grow: each call costs its new tokens; see ``IncrementalModel``."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.bundle import CHUNKED, Bundle
from aftexport.bundle.manifest import ChunkedPlan, Manifest
from aftexport.chunked.append_model import AppendModel, NotAppendable, append_plan
from aftexport.chunked.document_state import DocumentState, TokenDigest, check_bundle, to_bytes
from aftexport.chunked.opened_archive import OpenedArchive
from aftexport.errors import EngineError, InputError, UsageError
from aftexport.heads import AnyHead
from aftexport.heads.answer import Answer
from aftexport.system.contract import MAX_TOKENS

Document = Sequence[int] | Sequence[Sequence[float]] | NDArray[Any]
"""Token ids ``[n]``, or features ``[n, F]``."""


@dataclass(frozen=True)
class IncrementalAnswer:
    """The answer for a document after an append.

    Attributes:
        heads: the answer of each head for documents, for all tokens so far.
        outputs: the logits ``[width]`` of each of these heads in float64; and the rows
            ``[n, width]`` of each head for tokens, of the new tokens only.
    """

    heads: Mapping[str, Answer]
    outputs: Mapping[str, NDArray[Any]]


class IncrementalModel:
    """A causal model that classifies documents while they grow; it needs no torch.

    An append costs the new tokens, not the whole document, and its answer is that of the whole
    document. All that it needs of earlier tokens is in a state of constant size. Causal softmax
    attention without a window needs the keys of all tokens: the cost of a new token then grows
    with them, and so does the state, by ``token_state_bytes``. Threads may share the model.

    Args:
        bundle: a folder written by aftexport.
        threads: threads of ONNX Runtime; by default one for each usable core.

    Raises:
        BundleError: if the bundle is damaged.
        EngineError: if ONNX Runtime cannot load a graph of the bundle.
        UsageError: if the model cannot append tokens; gives the reason.
    """

    def __init__(self, bundle: str | os.PathLike[str], *, threads: int | None = None) -> None:
        opened = Bundle.open(Path(bundle))
        manifest = opened.manifest
        try:
            plan = _checked_plan(manifest)
            self._model = AppendModel(
                OpenedArchive(opened.path / CHUNKED, threads=threads or 0, fused=True),
                plan,
                opened.digest,
                num_features=None if manifest.features is None else manifest.features.count,
            )
        except NotAppendable as reason:
            raise UsageError(
                f"{opened.path}: the model cannot append tokens: {reason}.",
                "Use aftserve.Predictor, which runs whole documents.",
            ) from reason
        self._manifest = manifest
        self._digest = opened.digest
        self._plan = plan

    @property
    def bundle(self) -> str:
        """Digest of the bundle."""
        return self._digest

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a document; all keys in its state have at most 1 GiB."""
        return min(self._manifest.max_tokens or MAX_TOKENS, self._plan.max_state_tokens)

    @property
    def heads(self) -> Mapping[str, AnyHead]:
        """Head of each output: its task and its names."""
        return self._manifest.heads

    @property
    def token_state_bytes(self) -> int:
        """Bytes that each token adds to a state; 0 for a state of constant size."""
        return self._plan.token_state_bytes

    @property
    def max_state_bytes(self) -> int:
        """Maximum bytes of a saved state."""
        return self._model.reader.max_bytes

    def append(
        self, state: DocumentState | None, tokens: Document
    ) -> tuple[IncrementalAnswer, DocumentState]:
        """Append tokens to a document.

        Args:
            state: the state of the document so far, which stays as it is; None for a new document.
            tokens: at least one token id, or the features of at least one token.

        Returns:
            The answer for the longer document, and its state.

        Raises:
            InputError: if the tokens do not fit the model, if the document becomes too long, or if
                the state is of another bundle.
            EngineError: if the model fails, or an output is not finite.
        """
        before = 0 if state is None else self._tokens_of(state)
        new = self._checked(tokens, before)
        outputs, after = self._model.append(state, new)
        rows = {name: array[0] for name, array in outputs.items()}
        if not all(np.isfinite(array).all() for array in rows.values()):
            raise EngineError(
                "The model's output must be finite, got NaN or infinity.", "Append other tokens."
            )
        return self._answer(rows, after.tokens), after

    def save(self, state: DocumentState) -> bytes:
        """Return a state as bytes, at most ``max_state_bytes``, for ``load``.

        Raises:
            InputError: if the state is of another bundle.
        """
        self._tokens_of(state)
        return to_bytes(state)

    def load(self, content: bytes) -> DocumentState:
        """Return a saved state. The bytes may come from anyone: no code in them is run.

        Raises:
            InputError: if they are damaged, of another bundle, or of another version.
        """
        return self._model.reader.read(content)

    def digest(self, tokens: Document) -> str:
        """Return the digest of a document; it equals that of the state with these tokens.

        Raises:
            InputError: if the tokens do not fit the model.
        """
        return TokenDigest().extended(self._checked(tokens, 0)).hexdigest()

    def _answer(self, rows: Mapping[str, NDArray[Any]], tokens: int) -> IncrementalAnswer:
        outputs = dict(rows)
        answers: dict[str, Answer] = {}
        for name, head in self._manifest.heads.items():
            if head.is_per_token:
                continue
            outputs[name] = logits = rows[name].astype(np.float64)
            answers[name] = head.answer(logits)
            if calibration := (self._manifest.calibration or {}).get(name):
                answers[name] = calibration.applied(head, answers[name], logits, tokens)
        return IncrementalAnswer(answers, outputs)

    def _tokens_of(self, state: DocumentState) -> int:
        """Return the number of tokens of a state; raise InputError if it is of another bundle."""
        check_bundle(state.bundle, self.bundle)
        return state.tokens

    def _checked(self, tokens: Document, before: int) -> NDArray[Any]:
        """Return tokens as the model's input; raise InputError if they do not fit the model."""
        array = _array(tokens)
        count = before + len(array)
        if not len(array):
            raise InputError("Expected at least one token, got none.", "Append at least one.")
        if count > self.max_tokens:
            reason = ""
            if self.token_state_bytes and self.max_tokens == self._plan.max_state_tokens:
                size = self.max_tokens * self.token_state_bytes
                reason = f", whose keys and values fill a state of {size:,} bytes"
            raise InputError(
                f"Expected a document of at most {self.max_tokens} tokens{reason}, got {count}.",
                "Start a new document.",
            )
        if self._manifest.features is None:
            return self._checked_ids(array)
        return self._checked_features(array, before)

    def _checked_ids(self, array: NDArray[Any]) -> NDArray[np.int64]:
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InputError(
                f"Expected integers [tokens], got {array.dtype} {list(array.shape)}.",
                "Give token ids.",
            )
        size = self._manifest.vocab_size or 0
        outside = array[(array < 0) | (array >= size)]
        if outside.size:
            raise InputError(
                f"Token ids must be from 0 to {size - 1}, got {outside[0]}.",
                "Use the tokenizer of the model.",
            )
        return array.astype(np.int64)

    def _checked_features(self, array: NDArray[Any], before: int) -> NDArray[np.float32]:
        features = self._manifest.features
        assert features is not None  # checked by the caller
        if array.ndim != 2 or array.shape[1] != features.count or array.dtype.kind not in "fiu":
            raise InputError(
                f"Expected numbers [tokens, {features.count}], got {array.dtype} "
                f"{list(array.shape)}.",
                "Give a list of numbers for each token.",
            )
        try:
            return features.normalized(array, first=before)
        except ValueError as error:
            raise InputError(f"input_features: {error}.", "Correct the value.") from error


def append_problem(bundle: Bundle) -> str | None:
    """Return the reason why the model of a bundle cannot append tokens; None if it can."""
    try:
        plan = _checked_plan(bundle.manifest)
        archive = OpenedArchive(bundle.path / CHUNKED, threads=1, fused=False)
        append_plan(archive, plan, bundle.manifest.main_input)
    except NotAppendable as reason:
        return str(reason)
    return None


def _checked_plan(manifest: Manifest) -> ChunkedPlan:
    """Return the plan for documents in chunks; raise NotAppendable if the manifest has none."""
    if manifest.extra_inputs:
        names = ", ".join(extra.name for extra in manifest.extra_inputs)
        raise NotAppendable(f"it takes the extra inputs {names}")
    if manifest.chunked is None:
        raise NotAppendable(manifest.whole_only or "it has no plan for documents in chunks")
    return manifest.chunked


def _array(tokens: Document) -> NDArray[Any]:
    """Return tokens as an array; raise InputError if they are none."""
    if isinstance(tokens, str | bytes):
        raise InputError(
            f"Expected token ids or features, got {type(tokens).__name__}.",
            "Encode the text by the tokenizer of the model.",
        )
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(
            f"Expected an array of tokens ({error}).", "Correct the tokens."
        ) from error
    if not array.ndim:
        raise InputError(
            f"Expected a sequence of tokens, got {type(tokens).__name__}.", "Put it into a list."
        )
    return array
