import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import tiny_models
from hypothesis import example, given
from hypothesis import strategies as st

from aftexport.bundle.bundle import Bundle
from aftexport.bundle.byte_tokenizer import byte_tokenizer, is_byte_tokenizer
from aftexport.bundle.tokenizer import parse_tokenizer
from aftexport.errors import UsageError
from aftexport.pipeline.export import export

TOKENIZER = parse_tokenizer(byte_tokenizer().to_str())
FAMILY = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
@example(f" {FAMILY} e\N{COMBINING ACUTE ACCENT} \N{LATIN SMALL LETTER E WITH ACUTE}")
@example("\x00\x7f\x80\xff\r\n\n\t  \ufeff\ufffe\uffff\U0010ffff")
@example("<s></s>[PAD]")
def test_ids_are_bytes_of_text(text: str) -> None:
    assert TOKENIZER.encode(text).ids == list(text.encode())
    assert TOKENIZER.encode_batch_fast([text])[0].ids == list(text.encode())
    assert TOKENIZER.decode(list(text.encode())) == text


@given(TEXTS)
@example(f"a{FAMILY}b")
def test_offsets_are_of_character(text: str) -> None:
    """Each byte has the place of its character, whose bytes are one word."""
    encoding = TOKENIZER.encode(text)
    places = [place for place, one in enumerate(text) for _ in one.encode()]
    assert encoding.offsets == [(place, place + 1) for place in places]
    starts = [before != after for before, after in pairwise(encoding.word_ids)]
    assert starts == [before != after for before, after in pairwise(places)]


def test_every_character_survives() -> None:
    for start in range(0, sys.maxunicode + 1, 1 << 16):
        points = range(start, start + (1 << 16))
        text = "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
        assert TOKENIZER.encode(text).ids == list(text.encode())


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_lone_surrogate_is_refused(text: str) -> None:
    with pytest.raises((TypeError, UnicodeEncodeError)):
        TOKENIZER.encode(text)


@pytest.mark.parametrize("character", ["a", " ", "\n", "\N{SNOWMAN}", "\x00"])
def test_time_is_linear_in_length(character: str) -> None:
    """One word of a megabyte would take minutes in a quadratic tokenizer."""
    text = character * (1_000_000 // len(character.encode()))
    start = time.process_time()
    encoding = TOKENIZER.encode_batch_fast([text])[0]
    assert time.process_time() - start < 20
    assert len(encoding.ids) == len(text.encode())


def test_other_tokenizer_is_told_apart() -> None:
    assert is_byte_tokenizer(TOKENIZER)
    assert not is_byte_tokenizer(tiny_models.byte_tokenizer())  # its ids have another order


def test_export_writes_byte_tokenizer(checkpoint_file: Path, tmp_path: Path) -> None:
    """It replaces the tokenizer of the file."""
    out = tmp_path / "bytes.bundle"
    export(checkpoint_file, to="onnx", tokenizer="bytes", check_parity=False, out=out)
    tokenizer = Bundle.open(out).tokenizer()
    assert tokenizer is not None
    assert is_byte_tokenizer(tokenizer)


def test_vocabulary_below_bytes_is_refused(checkpoint_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="below the model's 255, got 255"):
        export(
            checkpoint_file,
            to="onnx",
            tokenizer="bytes",
            vocab_size=255,
            out=tmp_path / "bytes.bundle",
        )
    assert not (tmp_path / "bytes.bundle").exists()


def test_path_named_bytes_is_a_file(
    checkpoint_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bytes").write_text(tiny_models.byte_tokenizer().to_str())
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "file.bundle"
    export(checkpoint_file, to="onnx", tokenizer=Path("bytes"), check_parity=False, out=out)
    tokenizer = Bundle.open(out).tokenizer()
    assert tokenizer is not None
    assert not is_byte_tokenizer(tokenizer)
