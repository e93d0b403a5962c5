"""The options of windows: what they default to, and which are refused."""

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers_folders import byte_level_bpe, unigram, wordpiece

from aftexport.bundle.tokenizer import added_ids, byte_tokenizer
from aftexport.capture.model_spec import InputSpec
from aftexport.cli.export import run
from aftexport.errors import UsageError
from aftexport.heads import (
    FeatureExtraction,
    Head,
    MultiLabelClassification,
    Regression,
    SingleLabelClassification,
    TokenClassification,
)
from aftexport.options import ExportOptions, ModelSource
from aftexport.pipeline.request import checked_request
from aftexport.pipeline.windows import layout_of, policy_of

SPEC = InputSpec(("input_ids", "lengths"), 300, None, "", 512)
OPTIONS = ExportOptions(long_documents="windows")
BERT = wordpiece().to_str()
TWO = SingleLabelClassification(labels=("safe", "attack"))
THREE = SingleLabelClassification(labels=("safe", "attack", "spam"))
MULTI = MultiLabelClassification.of_width(2, None)
VALUE = Regression.of_width(1, None)
TAGS = TokenClassification.of_width(3, None)
VECTOR = FeatureExtraction(dimensions=2)


@pytest.mark.parametrize(
    ("given", "limit", "tokenizer", "expected"),
    [
        ({}, 512, BERT, (512, 384, (2,), (3,))),
        ({}, 512, None, (512, 384, (), ())),
        ({"window": 64}, None, BERT, (64, 48, (2,), (3,))),
        ({"window": 4}, 512, BERT, (4, 2, (2,), (3,))),
        ({"window": 1}, 512, None, (1, 1, (), ())),
        ({"window": 100, "stride": 98}, 100, BERT, (100, 98, (2,), (3,))),
    ],
)
def test_layout_has_defaults(
    given: dict[str, Any], limit: int | None, tokenizer: str | None, expected: tuple[Any, ...]
) -> None:
    spec = replace(SPEC, max_tokens=limit)
    found = layout_of(replace(OPTIONS, **given), spec, tokenizer)
    assert (found.tokens, found.stride, found.prefix, found.suffix) == expected


@pytest.mark.parametrize(
    ("given", "limit", "problem"),
    [
        ({}, None, "--window for a model without a limit"),
        ({"window": 513}, 512, "at most 512"),
        ({"window": 2}, 512, "more than the 2 tokens"),
        ({"stride": 511}, 512, "--stride must be at most 510"),
    ],
)
def test_layout_beyond_model_is_refused(
    given: dict[str, Any], limit: int | None, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        layout_of(replace(OPTIONS, **given), replace(SPEC, max_tokens=limit), BERT)


@pytest.mark.parametrize(
    ("given", "heads", "expected"),
    [
        ({"aggregate": "max"}, [TWO], ("max", {"0": "safe"})),
        ({"aggregate": "mean"}, [TWO], ("mean", {})),
        ({"aggregate": "noisy_or"}, [THREE], ("noisy_or", {})),
        (
            {"aggregate": "noisy_or", "background_label": "spam"},
            [THREE, TWO, MULTI],
            ("noisy_or", {"0": "spam"}),
        ),
        ({"aggregate": "max"}, [VALUE, VECTOR, TAGS], ("max", {})),
        ({}, [VECTOR], ("mean", {})),
        ({}, [TAGS], (None, {})),
    ],
)
def test_policy_fits_heads(
    given: dict[str, Any], heads: list[Head], expected: tuple[str | None, dict[str, str]]
) -> None:
    found = policy_of(replace(OPTIONS, **given), {str(i): head for i, head in enumerate(heads)})
    assert (found.aggregate, found.backgrounds) == expected


@pytest.mark.parametrize(
    ("given", "head", "problem"),
    [
        ({}, TWO, "needs --aggregate"),
        ({}, VALUE, "needs --aggregate"),
        ({"aggregate": "noisy_or"}, VALUE, "not probabilities"),
        ({"aggregate": "max"}, VECTOR, "a model that has none"),
        ({"aggregate": "mean"}, TAGS, "a model that has none"),
        ({"aggregate": "max", "background_label": "good"}, TWO, "--background-label"),
        ({"aggregate": "mean", "background_label": "safe"}, TWO, "--background-label"),
    ],
)
def test_policy_without_meaning_is_refused(given: dict[str, Any], head: Head, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        policy_of(replace(OPTIONS, **given), {"logits": head})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"window": 5}, "--window needs --long-documents"),
        ({"background_label": "a"}, "--background-label needs --long-documents"),
        ({"long_documents": "windows", "to": "trt-rtx"}, "needs --to onnx"),
        ({"long_documents": "chunks"}, "--long-documents must be one of windows"),
        ({"long_documents": "windows", "aggregate": "sum"}, "--aggregate must be one of"),
    ],
)
def test_options_alone_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        checked_request(ModelSource("model.pt"), ExportOptions(**given))


def test_triton_has_no_windows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["model.pt", "--to", "triton", "--long-documents", "windows", "--aggregate", "max"])
    assert "--long-documents needs --to onnx" in capsys.readouterr().err


def test_added_ids_are_found() -> None:
    assert added_ids(wordpiece()) == ((2,), (3,))
    assert added_ids(byte_level_bpe()) == ((0,), (2,))
    assert added_ids(unigram()) == ((0,), (2,))
    assert added_ids(byte_tokenizer()) == ((), ())
    few = Tokenizer(WordLevel({"x": 0, "y": 1}, unk_token="?"))
    few.post_processor = TemplateProcessing("$A y", special_tokens=[("y", 1)])
    assert added_ids(few) == ((), (1,))


def test_tokenizer_without_text_is_refused() -> None:
    tokenizer = wordpiece()
    tokenizer.post_processor = TemplateProcessing("[CLS]", special_tokens=[("[CLS]", 2)])
    with pytest.raises(UsageError, match="same tokens to every text"):
        added_ids(tokenizer)
