"""The state of a growing document: the values that later tokens need of the earlier tokens."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aftexport.chunked.spill import Array

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


@dataclass(frozen=True)
class Level:
    """The summary of a number of tokens: keys ``[1, S, *]`` and values ``[1, S, D]``."""

    tokens: int
    keys: Array
    values: Array


Merge = Callable[[Level, Level], Level]


@dataclass(frozen=True)
class StageState:
    """The earlier tokens of one attention, recurrence or convolution."""

    # the summaries of all tokens except the recent ones; None for an empty level
    levels: tuple[Level | None, ...] = (None,) * MAX_LEVELS
    # the values of the last tokens that the attention reads, by name, [1, left, *]
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
    the number of tokens.

    Attributes:
        bundle: the digest of the bundle whose model made the state.
        token_digest: the digest of the tokens.
        stages: the state of each attention, recurrence or convolution.
        pooled: the sums and maxima over the tokens; sums are in float64.
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
