"""Options of the command line from the fields of dataclasses."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import aftexport
from aftexport import EngineOptions, ExportOptions, ModelSource
from aftexport.cli.options import add_options, read_options
from aftexport.errors import UsageError
from aftexport.system.arguments import make_parser

EVERY = ExportOptions(
    to="trt-rtx",
    out=Path("o"),
    precision="int8",
    tolerance=0.5,
    max_length=7,
    long_documents="windows",
    window=6,
    stride=4,
    aggregate="noisy_or",
    background_label="x y",
    vocab_size=8,
    features=9,
    feature_file=Path("f"),
    inputs={"a": "number", "b": "category:3"},
    opset=19,
    batching=False,
    check_parity=False,
    force=True,
    task={"x": "regression", "y": "regression"},
    labels=("a", "b b", ""),
    heads=Path("h"),
    tokenizer="t",
    text_pairs=True,
    engine=EngineOptions(1, (2, 3), 4, 5, (75, 80)),
    timing_cache=Path("c"),
)
WORDS = (
    "--to trt-rtx --out o --precision int8 --tolerance 0.5 --max-length 7 --vocab-size 8 "
    "--features 9 --feature-file f --input a=number --input b=category:3 --opset 19 --no-batching "
    "--no-verify --force --task x=regression --task y=regression --heads h --tokenizer t "
    "--min-length 1 --opt-length 2,3 --max-batch 4 --workspace 5 --compute-capability 75,80 "
    "--timing-cache c --long-documents windows --window 6 --stride 4 --aggregate noisy_or "
    "--text-pairs --labels"
)
SOURCE = ModelSource(Path("m"), "a:b", allow_pickle=True, trust_remote_code=True)


def parsed(words: list[str]) -> Namespace:
    parser = make_parser("test", "")
    actions = {**add_options(parser, ExportOptions, required="to")}
    actions |= add_options(parser, ModelSource, without="path")
    assert all(action.help for action in actions.values())
    return parser.parse_args(words)


def test_every_option_is_read() -> None:
    given = parsed([*WORDS.split(), "a, b b,", "--background-label", "x y"])
    assert read_options(ExportOptions, given) == EVERY
    default = ExportOptions()
    assert [
        f.name for f in fields(EVERY) if getattr(EVERY, f.name) == getattr(default, f.name)
    ] == []


def test_defaults_are_those_of_fields() -> None:
    given = parsed(["--to", "onnx"])
    assert read_options(ExportOptions, given) == ExportOptions()
    assert read_options(ModelSource, given, path=None) == ModelSource()


def test_every_source_option_is_read() -> None:
    words = "--to onnx --factory a:b --allow-pickle --trust-remote-code"
    assert read_options(ModelSource, parsed(words.split()), path=Path("m")) == SOURCE
    assert SOURCE.permissions == ("--allow-pickle", "--trust-remote-code")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--task", "a=regression", "--task", "a=regression"], "got 'a=regression' twice"),
        (["--task", "regression", "--task", "a=regression"], "Give --task TASK for the only"),
        (["--input", "a"], "--input must be given once for each name, as NAME=KIND, got 'a'."),
    ],
)
def test_bad_name_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_options(ExportOptions, parsed(["--to", "onnx", *words]))


def test_one_task_needs_no_name() -> None:
    given = parsed(["--to", "onnx", "--task", "regression"])
    assert read_options(ExportOptions, given).task == "regression"


@pytest.mark.parametrize(
    ("call", "options", "said"),
    [
        (aftexport.export, {"max_lenght": 5}, r"export\(\) .* 'max_lenght'; did you mean 'max_len"),
        (aftexport.export, {"alow_pickle": 5}, "did you mean 'allow_pickle'"),
        (aftexport.load, {"max_length": 5}, r"load\(\) .*; it takes path, factory, allow_pickle"),
    ],
)
def test_unknown_option_is_type_error(
    call: Callable[..., Any], options: dict[str, int], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        call("model.pt", **options)


def test_source_needs_path_or_factory() -> None:
    with pytest.raises(UsageError, match="got neither"):
        aftexport.export()
