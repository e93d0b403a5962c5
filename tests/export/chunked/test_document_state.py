"""Summaries in levels keep the digits of single tokens, and the digest ignores the split."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import fewer

from aftexport.chunked.document import Level
from aftexport.chunked.document_state import (
    BASE_TOKENS,
    MAX_LEVELS,
    TokenDigest,
    with_summary,
)

TOKENS = fewer(1_000_000, 0.12)


def one(count: int, value: np.float32) -> Level:
    array = np.full((1, 1, 1), value, np.float32)
    return Level(count, array, array)


def added(*levels: Level) -> Level:
    total = np.float32(sum(level.values[0, 0, 0] for level in levels))
    return one(sum(level.tokens for level in levels), total)


def test_levels_keep_digits_of_tokens() -> None:
    """A plain float32 sum of as many tokens is off by more than 1e-4."""
    levels: tuple[Level | None, ...] = (None,) * MAX_LEVELS
    plain = np.float32(0)
    for _ in range(TOKENS):
        levels = with_summary(levels, one(1, np.float32(0.1)), added)
        plain += np.float32(0.1)
    exact = TOKENS * float(np.float32(0.1))
    found = sum(float(level.values[0, 0, 0]) for level in levels if level is not None)
    assert abs(plain / exact - 1) > 1e-4
    assert abs(found / exact - 1) < 1e-5


@settings(max_examples=20)
@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=30))
def test_levels_count_every_token(sizes: list[int]) -> None:
    levels: tuple[Level | None, ...] = (None,) * MAX_LEVELS
    for size in sizes:
        levels = with_summary(levels, one(size, np.float32(1)), added)
    counts = [0 if level is None else level.tokens for level in levels]
    assert sum(counts) == sum(sizes)
    assert all(count < BASE_TOKENS ** (place + 1) for place, count in enumerate(counts[:-1]))


@settings(max_examples=20)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_digest_ignores_split(sizes: list[int]) -> None:
    ids = np.arange(sum(sizes))
    digest = TokenDigest()
    for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
        digest = digest.extended(ids[start : start + size])
    assert digest == TokenDigest().extended(ids)


def test_digest_depends_on_every_token() -> None:
    ids = np.arange(500)
    digests = {TokenDigest().extended(ids).hexdigest()}
    for place in (0, 127, 128, 499):
        changed = ids.copy()
        changed[place] += 1
        digests.add(TokenDigest().extended(changed).hexdigest())
    digests.add(TokenDigest().extended(ids[:-1]).hexdigest())
    digests.add(TokenDigest().extended(np.append(ids, 0)).hexdigest())
    assert len(digests) == 7
