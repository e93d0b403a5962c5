"""The state of a growing document: the values that later tokens need of the earlier tokens.

Its bytes have a tag, a checksum, and arrays by safetensors:

8 bytes    the tag with the version of the format
32 bytes   BLAKE2b of all that follows
the rest   safetensors; the metadata has the bundle, and the tokens of each level
"""

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Self

import numpy as np
import safetensors.numpy
from annotated_types import Ge, Len
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from aftexport.bundle.manifest import Tokens
from aftexport.chunked.document import Array, Level
from aftexport.errors import InputError
from aftexport.system.validation import problem

BLOCK_BYTES = 1024
_CHAIN_BYTES = 32


@dataclass(frozen=True)
class TokenDigest:
    """The digest of the tokens so far."""

    # The bytes of the tokens are hashed block by block, and each block with the hash before it. The
    # standard library cannot store the inner state of a hash, so this state is stored instead.

    tokens: int = 0
    chain: bytes = bytes(_CHAIN_BYTES)  # the hash of all complete blocks
    pending: bytes = b""  # the bytes after the last complete block

    def __post_init__(self) -> None:
        if len(self.chain) != _CHAIN_BYTES or len(self.pending) >= BLOCK_BYTES:
            raise ValueError(
                f"expected a hash of {_CHAIN_BYTES} bytes and less than {BLOCK_BYTES} further "
                f"bytes, got {len(self.chain)} and {len(self.pending)}"
            )

    def extended(self, tokens: NDArray[Any]) -> Self:
        """Return the digest with further tokens, int64 ``[n]`` or float32 ``[n, F]``."""
        little = np.ascontiguousarray(tokens, tokens.dtype.newbyteorder("<"))
        content = self.pending + little.tobytes()
        chain, end = self.chain, len(content) - len(content) % BLOCK_BYTES
        for start in range(0, end, BLOCK_BYTES):
            chain = _hash(chain + content[start : start + BLOCK_BYTES])
        return type(self)(self.tokens + len(tokens), chain, content[end:])

    def hexdigest(self) -> str:
        """Return the digest of the tokens and their number, 64 hexadecimal digits."""
        return _hash(self.chain + self.pending + self.tokens.to_bytes(8, "little")).hex()


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHAIN_BYTES, person=b"aftexport.tokens").digest()


BASE_TOKENS = 128
"""The factor between the tokens of two levels."""
MAX_LEVELS = 3


Merge = Callable[[Level, Level], Level]


@dataclass(frozen=True)
class StageState:
    """The earlier tokens of one attention, recurrence or convolution."""

    # the summaries of all tokens except the recent ones; None for an empty level
    levels: tuple[Level | None, ...] = (None,) * MAX_LEVELS
    # the values of the last tokens that the attention reads, by name, [1, left, *]; or the keys
    # and values of these tokens, or of all, that a softmax attention reads
    recent: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}))
    # the state of a recurrence or convolution, which has no levels and no recent values
    recurrence: Array | None = None

    @property
    def summaries(self) -> list[Level]:
        """The levels that are not empty."""
        return [level for level in self.levels if level is not None]


@dataclass(frozen=True)
class DocumentState:
    """The values that later tokens need of the earlier tokens of a document.

    A state never changes: two appends to one state give two documents. Its size does not depend on
    the number of tokens, unless a softmax attention sees the keys of all.

    Attributes:
        bundle: the digest of the bundle whose model made the state.
        token_digest: the digest of the tokens.
        stages: the state of each attention, recurrence or convolution.
        pooled: the sums, maxima and values of marked tokens; sums are in float64.
        first: the values of the first token that later runs read, by name, ``[1, 1, *]``.
    """

    bundle: str
    token_digest: TokenDigest
    stages: tuple[StageState, ...]
    pooled: Mapping[str, Array]
    first: Mapping[str, Array]

    def __post_init__(self) -> None:
        for _, array in self.arrays():
            array.flags.writeable = False

    @property
    def tokens(self) -> int:
        """The number of tokens of the document so far."""
        return self.token_digest.tokens

    @property
    def digest(self) -> str:
        """The digest of the tokens so far; it is the same for any split of the document."""
        return self.token_digest.hexdigest()

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays."""
        return sum(array.nbytes for _, array in self.arrays())

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Yield every array with a name."""
        for number, stage in enumerate(self.stages):
            for place, level in enumerate(stage.levels):
                if level is not None:
                    yield f"stage.{number}.keys.{place}", level.keys
                    yield f"stage.{number}.values.{place}", level.values
            for name, array in stage.recent.items():
                yield f"stage.{number}.recent.{name}", array
            if stage.recurrence is not None:
                yield f"stage.{number}.recurrence", stage.recurrence
        yield from ((f"pooled.{name}", array) for name, array in self.pooled.items())
        yield from ((f"first.{name}", array) for name, array in self.first.items())


def with_summary(
    levels: tuple[Level | None, ...], summary: Level, merge: Merge
) -> tuple[Level | None, ...]:
    """Return levels with the summary of further tokens."""
    # A summary has sums in float32. A sum of a million tokens would lose the digits of one more
    # token. Each level therefore merges summaries until it has BASE_TOKENS times the tokens of the
    # level below. It then becomes a part of the level above.
    changed = list(levels)
    place = next(
        (i for i in range(MAX_LEVELS - 1) if summary.tokens < BASE_TOKENS ** (i + 1)),
        MAX_LEVELS - 1,
    )
    while True:
        old = changed[place]
        summary = summary if old is None else merge(old, summary)
        if place == MAX_LEVELS - 1 or summary.tokens < BASE_TOKENS ** (place + 1):
            changed[place] = summary
            return tuple(changed)
        changed[place] = None
        place += 1


VERSION = 1
_TAG = b"AFTSTAT"
_SUM_BYTES = 32
_HEAD_BYTES = len(_TAG) + 1 + _SUM_BYTES
_MAX_OTHER_BYTES = 1 << 20
"""The maximum bytes beside the arrays: names, shapes, metadata and the digest of the tokens."""
_AGAIN = "Append the document from its start."


class _Description(BaseModel):
    """The numbers of a state beside its arrays."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    bundle: str
    tokens: Annotated[Tokens, Ge(1)]
    # the tokens of each level of each stage; 0 for an empty level
    levels: tuple[Annotated[tuple[Tokens, ...], Len(MAX_LEVELS, MAX_LEVELS)], ...]

    @classmethod
    def of(cls, state: DocumentState) -> Self:
        levels = tuple(
            tuple(0 if level is None else level.tokens for level in stage.levels)
            for stage in state.stages
        )
        return cls(bundle=state.bundle, tokens=state.tokens, levels=levels)


def to_bytes(state: DocumentState) -> bytes:
    """Return a state as bytes, which ``StateReader`` reads."""
    digest = state.token_digest
    arrays = {name: np.ascontiguousarray(array) for name, array in state.arrays()}
    arrays["digest.chain"] = np.frombuffer(digest.chain, np.uint8)
    arrays["digest.pending"] = np.frombuffer(digest.pending, np.uint8)
    metadata = {"state": _Description.of(state).model_dump_json()}
    content = bytes(safetensors.numpy.save(arrays, metadata))
    return _TAG + bytes([VERSION]) + _checksum(content) + content


@dataclass(frozen=True)
class StateReader:
    """A reader of the states of one bundle."""

    example: DocumentState  # the state of a document of one token
    # the maximum number of tokens of each stage that its levels leave out
    unsummarized: tuple[int, ...]
    # the summary of one token of each stage; None for a recurrence and for kept keys
    levels: tuple[Level | None, ...]

    @property
    def max_bytes(self) -> int:
        """The maximum bytes of a state."""
        example = self.example
        size = _HEAD_BYTES + _MAX_OTHER_BYTES
        size += sum(a.nbytes for part in (example.pooled, example.first) for a in part.values())
        for stage, count, level in zip(example.stages, self.unsummarized, self.levels, strict=True):
            if stage.recurrence is not None:
                size += stage.recurrence.nbytes
            if level is not None:
                size += MAX_LEVELS * (level.keys.nbytes + level.values.nbytes)
            size += count * sum(rows.nbytes for rows in stage.recent.values())
        return size

    def read(self, content: bytes) -> DocumentState:
        """Return the state in ``content``.

        Raises:
            InputError: if it is damaged, of another bundle, or of another version.
        """
        if len(content) > self.max_bytes:
            raise InputError(
                f"A state of this bundle must have at most {self.max_bytes} bytes, got "
                f"{len(content)}.",
                _AGAIN,
            )
        safe = _checked(content)
        try:
            description = _Description.model_validate_json(_metadata(safe))
        except (ValidationError, ValueError, RecursionError) as error:
            reason = problem(error) if isinstance(error, ValidationError) else str(error)
            raise _damaged(reason) from error
        check_bundle(description.bundle, self.example.bundle)
        try:
            return self._state(description, safetensors.numpy.load(safe))
        except (SafetensorError, KeyError, ValueError) as error:
            raise _damaged(str(error)) from error

    def _state(self, description: _Description, arrays: dict[str, Array]) -> DocumentState:
        """Return the state of arrays; raise ValueError if an array does not fit the bundle."""
        digest = TokenDigest(
            description.tokens,
            _flat(arrays.pop("digest.chain")),
            _flat(arrays.pop("digest.pending")),
        )
        example = self.example
        token_bytes = len(example.token_digest.pending)
        if len(digest.pending) != description.tokens * token_bytes % BLOCK_BYTES:
            raise ValueError(f"expected the digest of {description.tokens} tokens, got another")
        if len(description.levels) != len(example.stages):
            raise ValueError(
                f"expected {len(example.stages)} stages, got {len(description.levels)}"
            )
        stages = tuple(
            self._stage(number, counts, description.tokens, arrays)
            for number, counts in enumerate(description.levels)
        )
        pooled = {n: _like(arrays.pop(f"pooled.{n}"), a, n) for n, a in example.pooled.items()}
        first = {n: _like(arrays.pop(f"first.{n}"), a, n) for n, a in example.first.items()}
        if arrays:
            raise ValueError(f"expected no array {min(arrays)}, got one")
        return DocumentState(
            description.bundle, digest, stages, MappingProxyType(pooled), MappingProxyType(first)
        )

    def _stage(
        self, number: int, counts: tuple[int, ...], tokens: int, arrays: dict[str, Array]
    ) -> StageState:
        """Return one stage, and take its arrays from ``arrays``."""
        one, example = self.levels[number], self.example.stages[number]
        if one is None and any(counts):
            raise ValueError(f"expected no levels of stage {number}, got some")
        if example.recurrence is not None:
            name = f"stage.{number}.recurrence"
            return StageState(recurrence=_like(arrays.pop(name), example.recurrence, name))
        levels: list[Level | None] = []
        for place, count in enumerate(counts):
            if not count or one is None:
                levels.append(None)
                continue
            names = [f"stage.{number}.{kind}.{place}" for kind in ("keys", "values")]
            keys, values = (arrays.pop(name) for name in names)
            level = Level(
                count, _like(keys, one.keys, names[0]), _like(values, one.values, names[1])
            )
            levels.append(level)
        recent = min(tokens, self.unsummarized[number])
        if one is not None and sum(counts) != tokens - recent:
            raise ValueError(
                f"expected {tokens - recent} tokens in the levels of stage {number}, got "
                f"{sum(counts)}"
            )
        rows = {}
        for name, row in example.recent.items():
            array = arrays.pop(f"stage.{number}.recent.{name}")
            expected = np.broadcast_to(row, (1, recent, *row.shape[2:]))
            rows[name] = _like(array, expected, name)
        return StageState(tuple(levels), MappingProxyType(rows))


def check_bundle(bundle: str, expected: str) -> None:
    """Raise InputError if a state is of another bundle than the expected one."""
    if bundle != expected:
        raise InputError(
            f"Expected a state of the bundle {expected}, got one of the bundle {bundle[:64]}.",
            "Append the document from its start, or use the other bundle.",
        )


def _like(array: Array, example: Array, name: str) -> Array:
    """Return an array; raise ValueError unless it has the type and the shape of an example."""
    if array.dtype != example.dtype or array.shape != example.shape:
        raise ValueError(
            f"expected {name} {example.dtype} {list(example.shape)}, got {array.dtype} "
            f"{list(array.shape)}"
        )
    return array


def _flat(array: Array) -> bytes:
    if array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError(f"expected bytes, got {array.dtype} {list(array.shape)}")
    return array.tobytes()


def _checked(content: bytes) -> bytes:
    """Return the safetensors in ``content`` if tag, version and checksum are right."""
    tag, rest = content[: len(_TAG)], content[_HEAD_BYTES:]
    if tag != _TAG or len(content) <= _HEAD_BYTES:
        raise InputError("Expected the bytes of a document's state, got others.", _AGAIN)
    version = content[len(_TAG)]
    if version != VERSION:
        raise InputError(
            f"Expected a state of version {VERSION}, got version {version}.",
            "Append the document from its start, or use the version of aftexport that saved it.",
        )
    if _checksum(rest) != content[len(_TAG) + 1 : _HEAD_BYTES]:
        raise _damaged("its checksum does not match")
    return rest


def _metadata(safe: bytes) -> str:
    """Return the description in the header of a safetensors file; raise ValueError without one."""
    try:
        (size,) = struct.unpack_from("<Q", safe)
        header = json.loads(safe[8 : 8 + size])
        text = header["__metadata__"]["state"]
    except (struct.error, KeyError, TypeError) as error:
        raise ValueError("it has no description") from error
    if not isinstance(text, str):
        raise ValueError("its description is not text")
    return text


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_SUM_BYTES).digest()


def _damaged(reason: str) -> InputError:
    return InputError(f"The state of the document is damaged ({reason}).", _AGAIN)
