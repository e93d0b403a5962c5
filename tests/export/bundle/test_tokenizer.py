"""Tokenizers of bundles: the bound on the length of a text in them, and panics of the library."""

import base64
import json
from importlib import import_module
from typing import Any

import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.normalizers import BertNormalizer, Prepend, Replace

from aftexport.bundle.byte_tokenizer import byte_tokenizer
from aftexport.bundle.tokenizer import normalizer_growth, parse_tokenizer
from aftexport.errors import UsageError

BPE_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=True)
FIRST = ("[CLS]", 1)


def tokenizer(**parts: Any) -> Tokenizer:
    one = Tokenizer(models.WordLevel(vocab={"a": 0, "[CLS]": 1}, unk_token="a"))
    for name, part in parts.items():
        setattr(one, name, part)
    return one


def template(single: str) -> Any:
    return processors.TemplateProcessing(single=single, special_tokens=[FIRST])


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
