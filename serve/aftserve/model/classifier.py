"""From checked documents to answers: the runs of a bundle's model."""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.bundle import Bundle
from aftexport.chunked.runner import ChunkedModel
from aftexport.engines import Engine, Stop
from aftexport.engines.explained_input import padded_choices
from aftexport.engines.peak_memory import PeakMemory
from aftexport.extra_inputs import NO_EXTRAS, ExtraValues, stacked
from aftexport.system.contract import EVIDENCE, EXPLAINED, LENGTHS
from aftserve.errors import DocumentTooLongError
from aftserve.model.answers import NO_MARKS, Answer, AnswerBuilder, Decoding
from aftserve.model.document_checks import DocumentChecks
from aftserve.model.token_marks import TokenMarks
from aftserve.model.wanted import EVERY_HEAD, Wanted
from aftserve.settings import Policy
from aftserve.types import Tokens


class Classifier(DocumentChecks):
    """Tokenizes, checks and classifies documents; ``DocumentChecks`` does all before the run.

    Args:
        bundle: a checked bundle.
        engine: the engine with the bundle's model.
        min_tokens: minimum length of a document.
        max_tokens: maximum length of a document; a lower limit of the bundle comes first.
        max_characters: maximum length of a text, checked before it is tokenized.
        chunked: the model for documents over the memory budget; None if the bundle has none.
        whole_tokens: maximum length of a document within that budget; None if unknown.
        memory: predicted memory of the runs of a model without chunks; None if unknown.
        memory_budget: maximum bytes of such a run. Longer documents are refused.
        policy: treatment of documents over the memory budget.
        spill: folder for large answers; None for the system's folder for temporary files.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        *,
        min_tokens: int = 1,
        max_tokens: int | None = None,
        max_characters: int | None = None,
        chunked: ChunkedModel | None = None,
        whole_tokens: int | None = None,
        memory: PeakMemory | None = None,
        memory_budget: int = 0,
        policy: Policy = "exact",
        spill: Path | None = None,
    ) -> None:
        self._builder = AnswerBuilder(bundle.manifest, spill)
        super().__init__(
            bundle,
            self._builder,
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            max_characters=max_characters,
            policy=policy,
        )
        self.engine = engine
        self.chunked = chunked
        self._memory, self._memory_budget = memory, memory_budget
        self._model_tokens = self.max_tokens
        if memory is not None:
            whole_tokens = memory.longest(memory_budget, self.max_tokens)
        self.whole_tokens = whole_tokens if whole_tokens is not None else self.max_tokens
        if policy != "exact" or memory is not None:
            self.max_tokens = min(self.max_tokens, self.whole_tokens)

    @property
    def masks_padding(self) -> bool:
        """Whether the model masks padding, so that documents of several lengths can share a run."""
        return LENGTHS in self.manifest.inputs

    def blank(self, tokens: int) -> NDArray[Any]:
        """Return a document of ``tokens`` equal tokens, as the model runs on it."""
        features = self.manifest.features
        if features is None:
            return np.zeros(tokens, np.int64)
        return np.zeros((tokens, features.count), np.float32)

    def in_chunks(self, tokens: int) -> bool:
        """Return whether a document of this length runs in chunks."""
        return self.chunked is not None and tokens > self.whole_tokens

    def check_length(self, tokens: int, *, more: bool = False) -> None:
        """Raise DocumentTooLongError for over ``max_tokens``, unless the policy cuts them off."""
        is_within = self.max_tokens < tokens <= self._model_tokens
        if self._memory is None or not is_within or self.policy in ("head", "tail"):
            super().check_length(tokens, more=more)
            return
        predicted = -(-self._memory.bytes_of(tokens) >> 20)
        raise DocumentTooLongError(
            f"A document must have at most {self.max_tokens} tokens to fit --memory-budget-mib "
            f"{self._memory_budget / (1 << 20):g}, got {tokens}{' or more' if more else ''}, "
            f"predicted to take {predicted} MiB.",
            f"Send a shorter document, or raise --memory-budget-mib to {predicted} if the machine "
            "has the memory.",
        )

    def part_count(self, tokens: int, wanted: Wanted) -> int:
        """Return the number of parts of a document that runs in chunks."""
        assert self.chunked is not None  # checked by in_chunks
        return self.chunked.count(tokens, evidence=wanted.numbers, outputs=wanted.heads)

    def keep_answers_in_memory(self) -> None:
        """Use no files for answers: each would be open until the answers of all documents end."""
        self._builder.uses_files = False

    def check_words(self, marks: TokenMarks | None, wanted: Wanted = EVERY_HEAD) -> None:
        """Raise InputError if a wanted head needs words, and a document has none."""
        for name, head in self._builder.token_heads.items():
            if wanted.has(name) and head.needs_words and marks is None:
                head.decoder()

    def parts(
        self,
        ids: Tokens,
        extras: ExtraValues = NO_EXTRAS,
        *,
        decoding: Decoding = NO_MARKS,
        wanted: Wanted = EVERY_HEAD,
    ) -> Generator[None, None, Answer]:
        """Classify a checked document in chunks; the generator yields after every part.

        Raises:
            EngineError: if the engine fails, or its output is not finite.
            StorageError: if there is no space for the values between layers.
        """
        assert self.chunked is not None  # checked by in_chunks
        sinks = self._builder.sinks(len(ids), decoding, wanted)
        outputs = yield from self.chunked.parts(
            ids, extras, evidence=wanted.numbers, sinks=sinks, outputs=wanted.heads
        )
        if wanted.explained:
            outputs[EVIDENCE] = outputs[EVIDENCE].reshape(1, -1, len(ids))
        return self._builder.answer(outputs, 0, len(ids), sinks, wanted)

    def classify(
        self,
        documents: Sequence[Tokens],
        stop: Stop | None = None,
        decodings: Sequence[Decoding] | None = None,
        extras: Sequence[ExtraValues] | None = None,
        wanted: Sequence[Wanted] | None = None,
    ) -> list[Answer]:
        """Classify checked documents in one run, padded to the longest.

        Args:
            documents: the tokens of each document.
            stop: ends the run early; None without a way to end it.
            decodings: the decoding of each document; None for documents without marks.
            extras: the extra inputs of each document; None for a model without extra inputs.
            wanted: the wanted part of the answer of each document; None for every head.

        Raises:
            RunStoppedError: if ``stop`` ended the run.
            EngineError: if the engine fails, or its output is not finite.
        """
        lengths = np.array([len(one) for one in documents], dtype=np.int64)
        blank = self.blank(int(lengths.max()))
        padded = np.zeros((len(documents), *blank.shape), blank.dtype)
        for row, one in zip(padded, documents, strict=True):
            row[: len(one)] = one[:]
        given = extras or [NO_EXTRAS] * len(documents)
        inputs = {
            self.manifest.main_input: padded,
            LENGTHS: lengths,
            **stacked(self.manifest.extra_inputs, given, len(blank)),
        }
        decodings = decodings or [NO_MARKS] * len(documents)
        wanted = wanted or [EVERY_HEAD] * len(documents)
        outputs = self._run({name: inputs[name] for name in self.manifest.inputs}, stop, wanted)
        return self._builder.answers(outputs, lengths.tolist(), decodings, wanted)

    def _run(
        self, inputs: Mapping[str, NDArray[Any]], stop: Stop | None, wanted: Sequence[Wanted]
    ) -> dict[str, NDArray[Any]]:
        """Return the wanted outputs, and the evidence as ``[batch, chosen, tokens]``."""
        heads = self.manifest.heads
        names = {name for name in heads if any(part.has(name) for part in wanted)}
        if not any(part.explained for part in wanted):
            return self.engine.run(inputs, stop, names)
        choice = padded_choices([part.numbers for part in wanted])
        if self.engine.takes_choice:
            inputs = {**inputs, EXPLAINED: choice}
        outputs = self.engine.run(inputs, stop, {*names, EVIDENCE})
        outputs[EVIDENCE] = outputs[EVIDENCE].reshape(*choice.shape, -1)
        return outputs
