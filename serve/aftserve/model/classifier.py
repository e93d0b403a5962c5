"""From documents to answers: the checks of a document, and the runs of a bundle's model."""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from aftexport.bundle.bundle import Bundle
from aftexport.bundle.tokenizer import is_byte_tokenizer, normalizer_growth
from aftexport.chunked.runner import ChunkedModel
from aftexport.chunked.windows import DECIDED, WindowedModel
from aftexport.engines import Engine, Stop
from aftexport.engines.onnxruntime.sessions import padded_choices
from aftexport.engines.peak_memory import PeakMemory
from aftexport.errors import InputError, panics_as_errors
from aftexport.extra_inputs import NO_EXTRAS, TOKEN_TYPES, ExtraValues, check_values, stacked
from aftexport.system.contract import EVIDENCE, EXPLAINED, FEATURES, IDS, LENGTHS, MAX_TOKENS
from aftserve.errors import DocumentTooLongError
from aftserve.model.answers import NO_MARKS, Answer, AnswerBuilder, Decoding
from aftserve.model.feature_tokens import FeatureTokens
from aftserve.model.token_marks import TokenMarker, TokenMarks
from aftserve.model.wanted import EVERY_HEAD, Wanted
from aftserve.settings import AnswerPolicy, Policy
from aftserve.types import ExtraFields, Text, TextPair, Tokens, texts_of

PIECE_CHARACTERS = 1 << 16
"""Length of the pieces in which texts are counted, which is fast and needs little memory."""
_MAX_EXTRA_TOKENS = 256
"""Maximum tokens by which a piece may exceed its share of the whole text."""
_LONG_CHARACTERS_PER_TOKEN = 8
"""A text with more characters for each allowed token is probably too long, and counted first."""
_NORMALIZED_CHARACTERS = 1 << 20
"""Characters into which a text may turn without a count, and a piece of a longer one."""
_INLINE_CHARACTERS = 512
"""Tokenizing a text up to this length takes less time than waking a thread."""
_MAX_PROBE_SECONDS = 0.005
_MAX_INLINE_SECONDS = 0.1
"""Time of a text on the event loop after which later texts are not tokenized there."""
_MAX_INLINE_GROWTH = 36
_PROBES = ("a", "a b ", " ", "\ufdfa", "漢", "".join(map(chr, range(32, 127))))
"""Texts that are repeated: words of any length, and characters that normalizers make longer."""
_OR_MORE = {False: "", True: " or more"}


def _check_form(*, is_features: bool, expected: bool) -> None:
    """Raise InputError if a document has features instead of token ids, or the reverse."""
    if is_features != expected:
        names = {True: FEATURES, False: IDS}
        raise InputError(
            f"This model takes {names[expected]}, got {names[is_features]}.",
            f"Send {names[expected]}.",
        )


def _sequences(text: Text) -> str | tuple[str, ...]:
    """Return a text as the tokenizers library takes it."""
    return text if isinstance(text, str) else texts_of(text)


@contextmanager
def _tokenizing() -> Iterator[None]:
    try:
        with panics_as_errors():
            yield
    except Exception as error:  # the library raises bare Exception and TypeError
        raise InputError(
            "The tokenizer cannot encode the text.",
            "Send Unicode text without lone surrogates, in words that the model knows, and without "
            "millions of equal characters in a row.",
        ) from error


@dataclass(frozen=True)
class EncodedText:
    """The checked tokens of a text, or of a pair of texts."""

    ids: NDArray[np.int64]
    marks: TokenMarks | None = None
    """The marks of the tokens; None if no head has spans."""
    types: NDArray[np.int64] | None = None
    """The types of the tokens of a pair; None if the model has no such input."""
    used: NDArray[np.int64] | None = None
    """The tokens of a pair, cut if it is too long; None for one text, which is cut later."""


class Classifier:
    """Tokenizes, checks and classifies documents."""

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        *,
        min_tokens: int = 1,
        max_tokens: int | None = None,  # a lower limit of the bundle comes first
        max_characters: int | None = None,  # of a text, before it is tokenized
        # For documents over the memory budget; None if the bundle has none.
        chunked: ChunkedModel | WindowedModel | None = None,
        memory: PeakMemory | None = None,  # of the runs of whole documents; None if unknown
        memory_budget: int = 0,  # bytes of a run, and of what the engine keeps of earlier ones
        policy: Policy = "exact",
        spill: Path | None = None,  # folder for large answers; None for that of the system
    ) -> None:
        self.manifest, self.engine, self.chunked = bundle.manifest, engine, chunked
        self._builder = AnswerBuilder(bundle.manifest, spill)
        self._tokenizer = bundle.tokenizer()
        self.takes_bytes = self._tokenizer is not None and is_byte_tokenizer(self._tokenizer)
        self._marker = (
            TokenMarker(self._tokenizer, with_words=self.needs_words)
            if self._tokenizer is not None and self._builder.has_spans
            else None
        )
        self._growth = normalizer_growth(self._tokenizer) if self._tokenizer is not None else 1
        self.inline_characters = 0
        self.max_characters = max_characters
        self.windowed = chunked if isinstance(chunked, WindowedModel) else None
        self.policy: AnswerPolicy = "windows" if self.windowed else policy
        self._cuts = policy in ("head", "tail")
        self._pair_cutter: Tokenizer | None = None
        self._memory, self._memory_budget = memory, memory_budget
        self.min_tokens = min_tokens
        own = None if self.windowed else self.manifest.max_tokens
        limits = (own, max_tokens, MAX_TOKENS)
        self._model_tokens = self.max_tokens = min(one for one in limits if one is not None)
        self.whole_tokens = chunked.whole_tokens if chunked else self.max_tokens
        if memory is not None:
            most = self.max_tokens if self.windowed is None else self.whole_tokens
            self.whole_tokens = memory.longest(memory_budget, most)
        if policy != "exact" or chunked is None:
            self.max_tokens = self.whole_tokens
        if self.manifest.text_pairs and self._tokenizer is not None and self._cuts:
            self._pair_cutter = Tokenizer.from_str(self._tokenizer.to_str())
            self._pair_cutter.enable_truncation(
                self.max_tokens,
                strategy="longest_first",
                direction="left" if policy == "tail" else "right",
            )
        # Predicted bytes of the runs since the last release: of the largest, and of all that were
        # larger than those before.
        self._largest = self._kept = 0

    def measure_tokenizer(self) -> None:
        """Find out whether short texts may be tokenized on the event loop.

        They may if the tokenizer is fast for texts of several kinds. A text that turns out to be
        slow later makes it slow for all.
        """
        if self._tokenizer is None or self._growth > _MAX_INLINE_GROWTH:
            return
        for piece in _PROBES:
            text = (piece * _INLINE_CHARACTERS)[:_INLINE_CHARACTERS]
            if min(self._seconds(text) for _ in range(3)) > _MAX_PROBE_SECONDS:
                return
        self.inline_characters = _INLINE_CHARACTERS

    def _seconds(self, text: str) -> float:
        start = time.perf_counter()
        with suppress(InputError):  # it may not know the words
            self.encode_marked(TextPair(text, "") if self.manifest.text_pairs else text)
        return time.perf_counter() - start

    def encode_inline(self, text: Text) -> EncodedText:
        """Return the result of ``encode_marked`` for a text of ``inline_characters`` at most."""
        start = time.perf_counter()
        try:
            return self.encode_marked(text)
        finally:
            if time.perf_counter() - start > _MAX_INLINE_SECONDS:
                self.inline_characters = 0

    @property
    def needs_words(self) -> bool:
        """Whether a head needs the words of a text, so that the model takes no token ids."""
        return any(head.needs_words for head in self._builder.token_heads.values())

    @property
    def has_tokenizer(self) -> bool:
        """Whether the bundle has a tokenizer and so takes texts."""
        return self._tokenizer is not None

    def check_text(self, text: Text) -> None:
        """Check a text, or a pair of texts, before it is tokenized.

        Raises:
            InputError: if the bundle has no tokenizer, or takes pairs and this is none, or the
                reverse.
            DocumentTooLongError: if it has more than ``max_characters``.
        """
        if self._tokenizer is None:
            main = self.manifest.main_input
            raise InputError("This model has no tokenizer.", f"Send {main} instead of text.")
        if isinstance(text, TextPair) is not self.manifest.text_pairs:
            raise (
                InputError(
                    "This model takes pairs of texts, got one text.",
                    "Send text and text_pair in JSON.",
                )
                if self.manifest.text_pairs
                else InputError(
                    "This model takes one text, got a pair.",
                    "Leave text_pair out; a model exported with --text-pairs takes pairs.",
                )
            )
        self.check_characters(len(text))

    def check_characters(self, count: int, *, more: bool = False) -> None:
        """Raise DocumentTooLongError if a text, or its start if there is ``more``, is too long."""
        if self.max_characters is not None and count > self.max_characters:
            raise DocumentTooLongError(
                f"A text must have at most {self.max_characters} characters, got {count}"
                f"{_OR_MORE[more]}.",
                "Send a shorter one; the server never truncates it silently.",
            )

    def check_length(self, tokens: int, *, more: bool = False) -> None:
        """Raise DocumentTooLongError for over ``max_tokens``, unless the policy cuts them off."""
        if tokens <= self.max_tokens or self._cuts:
            return
        got = f"got {tokens}{_OR_MORE[more]}"
        if self.max_tokens == self.manifest.max_tokens and self.windowed is None:
            raise DocumentTooLongError(
                f"A document must have at most {self.max_tokens} tokens, the limit of the model, "
                f"{got}.",
                "Send a shorter one; the server never truncates it silently. "
                + (
                    "With --long-documents head it cuts the longer of two texts."
                    if self.manifest.text_pairs
                    else "A model exported with --long-documents windows reads longer ones in "
                    "windows."
                ),
            )
        if self._memory is None or tokens > self._model_tokens:
            raise DocumentTooLongError(
                f"A document must have at most {self.max_tokens} tokens, {got}.",
                "Send a shorter one; the server never truncates it silently.",
            )
        predicted = -(-self._memory.bytes_of(tokens) >> 20)
        raise DocumentTooLongError(
            f"A document must have at most {self.max_tokens} tokens to fit --memory-budget-mib "
            f"{self._memory_budget / (1 << 20):g}, {got}, predicted to take {predicted} MiB.",
            f"Send a shorter document, or raise --memory-budget-mib to {predicted} if the machine "
            "has the memory.",
        )

    def count(self, piece: str, before: int) -> int:
        """Add a piece to a lower bound of a text's tokens."""
        # before: the bound for the pieces before; 0 for the first piece
        try:
            tokens = before + max(0, len(self.tokenize(piece)) - _MAX_EXTRA_TOKENS)
        except InputError:  # the tokenizer may not know a word that was cut in two
            return before
        self.check_length(tokens, more=True)
        return tokens

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the checked tokens of a text; one that is far too long is refused early.

        Raises:
            InputError: if it cannot be tokenized; see ``check``.
            DocumentTooLongError: if it is over ``max_characters`` or ``max_tokens``.
        """
        self._check_size(text)
        return self.check_ids(self.tokenize(text))

    def encode_marked(self, text: Text) -> EncodedText:
        """Return the checked tokens of a text or a pair, and their marks if a head has spans."""
        if self._marker is None and isinstance(text, str):
            return EncodedText(self.encode(text))
        self._check_size(text)
        encoding = self._whole_encoding(text)
        ids = self.check_ids(np.array(encoding.ids, dtype=np.int64))
        if isinstance(text, str):
            return EncodedText(ids, self._marks(text, encoding))
        encoding = self._cut_pair(text, encoding)
        types = np.array(encoding.type_ids) if self.manifest.typed_pairs else None
        return EncodedText(ids, self._marks(text, encoding), types, np.array(encoding.ids))

    def _marks(self, text: Text, encoding: Encoding) -> TokenMarks | None:
        return None if self._marker is None else self._marker.marks(text, encoding)

    def _check_size(self, text: Text) -> None:
        self.check_text(text)
        if len(text) > _LONG_CHARACTERS_PER_TOKEN * self.max_tokens and not self._cuts:
            tokens = 0
            for one in texts_of(text):
                for start in range(0, len(one), PIECE_CHARACTERS):
                    tokens = self.count(one[start : start + PIECE_CHARACTERS], tokens)

    def tokenize(self, text: str) -> NDArray[np.int64]:
        """Return the token ids of a text; other threads can run meanwhile."""
        assert self._tokenizer is not None  # checked by check_text
        # Only the batch methods release the interpreter's lock; the fast one keeps no offsets.
        self._check_normalized(text)
        with _tokenizing():
            encoded = self._tokenizer.encode_batch_fast([text])[0]
        return np.array(encoded.ids, dtype=np.int64)

    def encoding(self, text: Text) -> Encoding:
        """Return the tokens of a text or a cut pair with the characters of each."""
        encoding = self._whole_encoding(text)
        return encoding if isinstance(text, str) else self._cut_pair(text, encoding)

    def _whole_encoding(self, text: Text) -> Encoding:
        """Return the tokens of a text or a pair; see ``tokenize``."""
        assert self._tokenizer is not None  # checked by check_text
        for one in texts_of(text):
            self._check_normalized(one)
        with _tokenizing():
            return self._tokenizer.encode_batch([_sequences(text)])[0]

    def _cut_pair(self, pair: TextPair, encoding: Encoding) -> Encoding:
        """Return the tokens of a pair, of which the longer text is cut first if it is too long."""
        if self._pair_cutter is None or len(encoding) <= self.max_tokens:
            return encoding
        with _tokenizing():
            return self._pair_cutter.encode_batch([_sequences(pair)])[0]

    def _check_normalized(self, text: str) -> None:
        """Refuse a text that the normalizer would make far longer, in pieces of bounded size."""
        if self.max_characters is None or len(text) * self._growth <= _NORMALIZED_CHARACTERS:
            return
        assert self._tokenizer is not None  # checked by check_text
        count, length = 0, _NORMALIZED_CHARACTERS // self._growth
        for start in range(0, len(text), length):
            with _tokenizing():
                piece = text[start : start + length]
                count += len(self._tokenizer.normalizer.normalize_str(piece))
            if count > self.max_characters:
                raise DocumentTooLongError(
                    f"A text must have at most {self.max_characters} characters after the "
                    f"tokenizer's normalization, got {count} or more.",
                    "Send a shorter one; the server never truncates it silently.",
                )

    def check(self, document: Sequence[Any] | NDArray[Any] | Tokens | TextPair) -> Tokens:
        """Check the tokens of one document, and return them for the model.

        Raises:
            InputError: for fewer than ``min_tokens``, an id outside the vocabulary, or other
                values than finite features.
            DocumentTooLongError: for more than ``max_tokens``, unless the policy cuts them off.
        """
        if isinstance(document, FeatureTokens):
            self.check_count(len(document))
            return document
        assert isinstance(document, Sequence | np.ndarray)  # no other type of document exists
        features = self.manifest.features
        first = document[0] if len(document) else None
        if first is not None:
            _check_form(
                is_features=isinstance(first, list | np.ndarray), expected=features is not None
            )
        if features is None:
            return self.check_ids(document)
        self.check_count(len(document))
        return FeatureTokens.of(document, features)

    def check_count(self, tokens: int) -> None:
        """Check the number of tokens of a document; see ``check``."""
        if tokens == 0:
            raise InputError("The document has no tokens.", "Send some text.")
        if tokens < self.min_tokens:
            raise InputError(
                f"The document must have at least {self.min_tokens} tokens, got {tokens}.",
                "Send a longer one; the engine cannot pad.",
            )
        self.check_length(tokens)

    def check_extras(
        self, given: ExtraFields, tokens: int, types: NDArray[np.int64] | None = None
    ) -> ExtraValues:
        """Return the checked extra inputs of a document of ``tokens`` tokens, with its types.

        Raises:
            InputError: if one is missing, unknown, or does not fit, or they are not a mapping.
        """
        remedy = "Send inputs beside the document, as extra_inputs of GET /info describes them."
        if not isinstance(given, Mapping):
            raise InputError(
                f"Expected a mapping from the names of extra inputs to values, got "
                f"{type(given).__name__}.",
                remedy,
            )
        if types is not None:
            if TOKEN_TYPES in given:
                raise InputError(
                    f"The tokenizer makes {TOKEN_TYPES} of a pair, got them in the request too.",
                    f"Leave {TOKEN_TYPES} out, or send input_ids instead of text.",
                )
            given = {**given, TOKEN_TYPES: types}
        try:
            return check_values(self.manifest.extra_inputs, given, tokens)
        except ValueError as error:
            problem = str(error)
            raise InputError(f"{problem[0].upper()}{problem[1:]}.", remedy) from None

    def check_ids(self, ids: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
        """Check the token ids of one document, and return them as an array; see ``check``."""
        self.check_count(len(ids))
        vocabulary = self.manifest.vocab_size or 0
        if isinstance(ids, np.ndarray):
            low, high = int(ids.min()), int(ids.max())
        else:  # an id may be too large for an array
            low, high = min(ids), max(ids)
        bad = next((i for i in (low, high) if not 0 <= i < vocabulary), None)
        if bad is not None:
            raise InputError(
                f"Token id {bad} is outside the vocabulary.",
                f"Send ids from 0 to {vocabulary - 1}.",
            )
        return np.asarray(ids, dtype=np.int64)

    def cut(self, ids: Tokens) -> Tokens:
        """Cut a checked document by the policy for long documents."""
        if len(ids) <= self.max_tokens:
            return ids
        start = len(ids) - self.max_tokens if self.policy == "tail" else 0
        return ids[start : start + self.max_tokens]

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
        if self.windowed is not None:
            self._make_room(self.windowed.run_windows, self.windowed.whole_tokens)
        outputs = yield from self.chunked.parts(
            ids, extras, evidence=wanted.numbers, sinks=sinks, outputs=wanted.heads
        )
        if wanted.explained:
            outputs[EVIDENCE] = outputs[EVIDENCE].reshape(1, -1, len(ids))
        decided = {
            name: outputs[DECIDED + name][0]
            for name in self.manifest.heads
            if DECIDED + name in outputs
        }
        answer = self._builder.answer(outputs, 0, len(ids), sinks, wanted)
        return replace(answer, decided=decided)

    def classify(
        self,
        documents: Sequence[Tokens],  # each [T] ids or [T, F] features
        stop: Stop | None = None,
        decodings: Sequence[Decoding] | None = None,
        extras: Sequence[ExtraValues] | None = None,
        wanted: Sequence[Wanted] | None = None,
    ) -> list[Answer]:
        """Classify checked documents in one run, padded to the longest.

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
        self._make_room(len(documents), len(blank))
        outputs = self._run({name: inputs[name] for name in self.manifest.inputs}, stop, wanted)
        return self._builder.answers(outputs, lengths.tolist(), decodings, wanted)

    def release(self) -> None:
        """Return the memory of earlier runs to the system."""
        self.engine.release()
        self._largest = self._kept = 0

    def _make_room(self, documents: int, tokens: int) -> None:
        """Release the memory of earlier runs if it might exceed the budget together with a run."""
        if self._memory is None:
            return
        needed = self._memory.bytes_of(tokens, documents)
        if needed <= self._largest:  # a smaller run takes what a larger one left
            return
        if self._kept and self._kept + needed > self._memory_budget:
            self.release()
        self._kept += needed
        self._largest = needed

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
