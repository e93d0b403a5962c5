"""The running digest of a document's tokens, which does not depend on how they were appended."""

import hashlib
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1024
_CHAIN_BYTES = 32


@dataclass(frozen=True)
class TokenDigest:
    """The digest of the tokens so far.

    The bytes of the tokens are hashed block by block, and each block with the hash before it. The
    standard library cannot store the inner state of a hash, so this state is stored instead.

    Attributes:
        tokens: the number of tokens.
        chain: the hash of all complete blocks.
        pending: the bytes after the last complete block.
    """

    tokens: int = 0
    chain: bytes = bytes(_CHAIN_BYTES)
    pending: bytes = b""

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
