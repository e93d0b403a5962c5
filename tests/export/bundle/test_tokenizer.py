"""Tokenizers of bundles: the bound on the length of a text in them, and panics of the library."""

import base64
import json
import sys
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from tokenizers.normalizers import BertNormalizer, Prepend, Replace

from aftexport.bundle.bundle import Bundle
from aftexport.bundle.tokenizer import (
    byte_tokenizer,
    is_byte_tokenizer,
    normalizer_growth,
    parse_tokenizer,
)
from aftexport.errors import UsageError
from aftexport.pipeline.export import export

BPE_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=True)
FIRST = ("[CLS]", 1)


def tokenizer(**parts: Any) -> Tokenizer:
    one = Tokenizer(models.WordLevel(vocab={"a": 0, "[CLS]": 1}, unk_token="a"))
    for name, part in parts.items():
        setattr(one, name, part)
    return one


def template(single: str, pair: str = "$A $B") -> Any:
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=[FIRST])


CHAIN = [Replace(old, new * 100) for old, new in zip("abcde", "bcdef", strict=True)]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"normalizer": normalizers.Sequence(CHAIN)}, "at most 4096 characters.* 10000000000"),
        ({"normalizer": normalizers.Sequence([Prepend("x")] * 13)}, "characters.* got 8192"),
        ({"normalizer": Replace(Regex("y*"), "x" * 4096)}, "characters.* got 4097"),
        ({"normalizer": Replace("", "x" * 4096)}, "characters.* got 4097"),
        ({"pre_tokenizer": pre_tokenizers.Sequence([BPE_BYTES] * 5)}, "characters.* got 32768"),
        ({"post_processor": template("[CLS] " * 257 + "$A")}, "got 257 tokens and 1 copies"),
        ({"post_processor": template("[CLS] $A $A")}, "got 1 tokens and 2 copies"),
        (
            {"post_processor": processors.Sequence([template("[CLS] $A $A"), template("$A")])},
            "2 copies",
        ),
        ({"post_processor": template("$A", "$A [CLS] $B $B")}, "got 1 tokens and 2 copies"),
        ({"post_processor": template("$A", "$A $B" + " [CLS]" * 257)}, "got 257 tokens"),
    ],
)
def test_growing_tokenizer_is_refused(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_tokenizer(tokenizer(**parts).to_str())


def test_added_token_is_not_normalized_before() -> None:
    """The library normalizes the added tokens of a file when it reads it."""
    content = json.loads(tokenizer(normalizer=normalizers.Sequence(CHAIN * 4)).to_str())
    content["added_tokens"] = [{"id": 0, "content": "a", "normalized": True, "special": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)]  # fmt: skip
    with pytest.raises(UsageError, match="is refused"):
        parse_tokenizer(json.dumps(content))


@pytest.mark.parametrize(
    ("normalizer", "growth"),
    [
        (None, 1),
        (normalizers.Sequence([Prepend("▁"), Replace(" ", "▁")]), 2),
        (normalizers.Sequence([Replace("``", '"'), normalizers.NFKD(), BertNormalizer()]), 18),
        (normalizers.Sequence([normalizers.NFC(), Replace(Regex(" {2,}"), "▁")]), 36),
    ],
)
def test_usual_normalizer_is_taken(normalizer: Any, growth: int) -> None:
    whole = tokenizer(pre_tokenizer=BPE_BYTES, post_processor=template("[CLS] $A [CLS]"))
    if normalizer is not None:
        whole.normalizer = normalizer
    assert normalizer_growth(parse_tokenizer(whole.to_str())) == growth
    assert normalizer_growth(byte_tokenizer()) == 1


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "Sequence": ([],),
    "Replace": ("a", "b"),
    "CharDelimiterSplit": ("a",),
    "Split": ("a", "isolated"),
    "BertProcessing": (FIRST, FIRST),
    "RobertaProcessing": (FIRST, FIRST),
    "TemplateProcessing": ("$A", "$A $B", []),
}
BASES = ("Normalizer", "PreTokenizer", "PostProcessor")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("normalizers", "normalizer"),
        ("pre_tokenizers", "pre_tokenizer"),
        ("processors", "post_processor"),
    ],
)
def test_every_component_is_known(module: str, name: str) -> None:
    library = import_module(f"tokenizers.{module}")
    kinds = [kind for kind, value in vars(library).items() if isinstance(value, type)]
    for kind in {*kinds} - {*BASES, "Precompiled"}:
        part = getattr(library, kind)(*ARGUMENTS.get(kind, ()))
        parse_tokenizer(tokenizer(**{name: part}).to_str())


def test_table_of_sentencepiece_counts_longest_entry() -> None:
    """A trie of no units, and two entries."""
    table = (0).to_bytes(4, "little") + b"ab\0" + ("x" * 5000 + "\0").encode()
    content = json.loads(tokenizer().to_str())
    content["normalizer"] = {
        "type": "Precompiled",
        "precompiled_charsmap": base64.b64encode(table).decode(),
    }
    with pytest.raises(UsageError, match="got 5000"):
        parse_tokenizer(json.dumps(content))


def test_component_without_type_is_refused() -> None:
    """The library finds its type by its fields."""
    content = json.loads(tokenizer().to_str())
    content["normalizer"] = {"pattern": {"String": "a"}, "content": "b" * 1000}
    with pytest.raises(UsageError, match="expected a known component with its type"):
        parse_tokenizer(json.dumps(content))


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


@pytest.mark.parametrize(("given", "is_bytes"), [("bytes", True), (Path("bytes"), False)])
def test_export_writes_given_tokenizer(
    given: str | Path,
    is_bytes: bool,
    checkpoint_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokenizer of the bytes replaces that of the file; a path of that name is a file."""
    (tmp_path / "bytes").write_text(tiny_models.byte_tokenizer().to_str())
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out.bundle"
    export(checkpoint_file, to="onnx", tokenizer=given, check_parity=False, out=out)
    tokenizer = Bundle.open(out).tokenizer()
    assert tokenizer is not None
    assert is_byte_tokenizer(tokenizer) == is_bytes
