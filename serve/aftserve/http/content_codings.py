"""The codings of compressed request bodies: gzip and zstd."""

import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Protocol

from aftserve.errors import RefusedError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

IDENTITY = "identity"
"""The coding of a body that is not compressed."""
_PIECE_BYTES = 4096
"""Input of one step. It bounds the work of a step on members that expand to nothing."""
_GZIP_BITS = 31
"""zlib's number for a gzip header and the largest window, of 32 KiB."""
_MAX_ZSTD_WINDOW_LOG = 23
"""8 MiB, the largest window that RFC 9659 allows in HTTP."""


class BrokenBodyError(RefusedError):
    """A compressed body cannot be expanded."""

    status = 400


class _Stream(Protocol):
    """A decompressor of one gzip member or zstd frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _GzipMember:
    """A gzip member that keeps the input it has not consumed, as zstd's decompressor does."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(_GZIP_BITS)
        self.eof = False
        self.unused_data = b""

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        part = self._stream.decompress(self._stream.unconsumed_tail + data, max_length)
        self.eof, self.unused_data = self._stream.eof, self._stream.unused_data
        return part


def _zstd_frame() -> _Stream:
    parameter = zstd.DecompressionParameter.window_log_max
    return zstd.ZstdDecompressor(options={parameter: _MAX_ZSTD_WINDOW_LOG})


_STREAMS: dict[str, Callable[[], _Stream]] = {"gzip": _GzipMember, "zstd": _zstd_frame}
_MAX_WINDOW_BYTES = {"gzip": 1 << 15, "zstd": 1 << _MAX_ZSTD_WINDOW_LOG}
CODINGS = tuple(_STREAMS)
"""The names of the codings that the server expands."""


def coding_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the content coding of a request in lower case. Several are joined by commas.

    Args:
        headers: names in lower case, and values.
    """
    values = [value.decode("latin-1") for name, value in headers if name == b"content-encoding"]
    coding = ",".join(values).strip().lower() or IDENTITY
    return "gzip" if coding == "x-gzip" else coding  # RFC 9110, 8.4.1.3


class BodyExpander:
    """The expansion of a compressed body in steps of bounded time and size.

    Args:
        coding: one of ``CODINGS``.

    Attributes:
        max_window_bytes: maximum bytes of its past output that a stream keeps.
    """

    def __init__(self, coding: str) -> None:
        self.max_window_bytes = _MAX_WINDOW_BYTES[coding]
        self._coding = coding
        self._new_stream = _STREAMS[coding]
        self._stream = self._new_stream()
        self._input = memoryview(b"")
        self._may_hold_output = False
        self._in_padding = False

    @property
    def needs_input(self) -> bool:
        """Whether all input is consumed, and all its output returned."""
        return not (self._input or self._may_hold_output or self._stream.unused_data)

    def feed(self, data: bytes) -> None:
        """Add the next part of the compressed body, once ``needs_input``."""
        self._input = memoryview(data)

    def step(self, max_bytes: int) -> bytes:
        """Return at most this many bytes of the expanded body; possibly none.

        Raises:
            BrokenBodyError: if the body is not compressed in this way.
        """
        data = b""
        if self._stream.eof:  # a body may have several members or frames
            data = self._stream.unused_data
            self._stream, self._may_hold_output = self._new_stream(), False
            self._in_padding = self._coding == "gzip"
        if not (data or self._may_hold_output):
            data, self._input = bytes(self._input[:_PIECE_BYTES]), self._input[_PIECE_BYTES:]
        if self._in_padding:  # gzip ignores zeros after a member, as tapes and disks leave them
            data = data.lstrip(b"\0")
            self._in_padding = not data
        if not (data or self._may_hold_output):
            return b""
        try:
            part = self._stream.decompress(data, max_bytes)
        except (zlib.error, zstd.ZstdError) as error:
            raise BrokenBodyError(
                f"The body must be compressed by {self._coding}, got other bytes ({error}).",
                "Send it whole as the compressor wrote it, or without Content-Encoding.",
            ) from None
        self._may_hold_output = len(part) == max_bytes and not self._stream.eof
        return part

    def finish(self) -> None:
        """Check that the body is complete.

        Raises:
            BrokenBodyError: if its end is missing.
        """
        if not (self._stream.eof or self._in_padding):
            raise BrokenBodyError(
                f"The body must be a complete {self._coding} stream, got one without its end.",
                "Send it whole as the compressor wrote it.",
            )
