import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import tiny_models
import torch
from bad_models import model_folder
from commands import assert_refused, listing, run_here, run_python
from sampling import any_case
from tokenizers import Tokenizer, models

import aftexport
from aftexport.bundle.bundle import Bundle
from aftexport.errors import CheckpointError, EngineError, TraceError, UsageError
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.parity.comparison import compare
from aftexport.pipeline.export import export
from aftexport.pipeline.results import parity_error


@pytest.fixture(scope="session")
def second_export(
    checkpoint_file: Path, bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Export the same checkpoint elsewhere, in another process with other hash seeds."""
    folder = tmp_path_factory.mktemp("another place")
    words = ["-m", "aftexport", checkpoint_file, "--to", "onnx", "--out", "deep/er/result"]
    outcome = run_python(*words, cwd=folder, PYTHONHASHSEED="4242")
    assert outcome.code == 0, outcome.err
    return folder / "deep" / "er" / "result"


@pytest.mark.slow
def test_two_exports_are_identical(bundle_folder: Path, second_export: Path) -> None:
    """The bundles of one checkpoint are the same byte for byte."""
    assert listing(bundle_folder) == listing(second_export)


def test_export_is_independent_of_earlier_exports(checkpoint_file: Path, bundle_copy: Path) -> None:
    """An export after others in one process is the same too."""
    before = listing(bundle_copy)
    manifest = bundle_copy / "manifest.json"
    manifest.write_text(manifest.read_text("utf-8") + " ", "utf-8")
    export(checkpoint_file, out=bundle_copy, force=True)
    assert listing(bundle_copy) == before
    assert listing(bundle_copy.parent).keys() == {
        "copy.bundle", *(f"copy.bundle/{name}" for name in before)
    }  # fmt: skip


def test_bundle_omits_place_of_export(second_export: Path) -> None:
    for file in second_export.iterdir():
        content = file.read_bytes()
        for secret in (b"another place", str(Path.home()).encode() + b"/", b"site-packages"):
            assert secret not in content, file.name


def test_folder_and_checkpoint_give_same_model(
    checkpoint_file: Path, bundle_folder: Path, tmp_path: Path
) -> None:
    folder = model_folder()(tmp_path, checkpoint_file)
    bundle = export(folder, check_parity=False)
    assert bundle.path == tmp_path / "model.bundle"
    assert bundle.manifest.source["kind"] == "config and safetensors"
    assert bundle.model_path.read_bytes() == (bundle_folder / "model.onnx").read_bytes()


def test_every_option_reaches_the_bundle(
    state_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokens.json").write_text(tiny_models.byte_tokenizer().to_str(), "utf-8")
    outcome = run_here(
        ["--to", "onnx", "--factory", "tiny_models:Bag", "--out", tmp_path / "b", "--opset", "18",
         "--max-length", "50", "--labels", "x,y,z", "--tokenizer", tmp_path / "tokens.json",
         "--no-verify", state_file],
        capsys,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "Not checked" in outcome.out
    bundle = Bundle.open(tmp_path / "b")
    manifest = bundle.manifest
    assert manifest.heads["logits"].names == ("x", "y", "z")
    assert (manifest.opset, manifest.max_tokens, manifest.inputs) == (18, 50, ("input_ids",))
    assert manifest.operators == {}
    assert bundle.tokenizer() is not None
    assert json.loads((tmp_path / "b" / "parity.json").read_text()) == {
        "checked": False, "cases": []
    }  # fmt: skip
    model = onnx.load(bundle.model_path)
    assert {o.domain: o.version for o in model.opset_import}[""] == 18
    verified = run_here(["verify", tmp_path / "b"], capsys)
    assert verified.code == 0, verified.out


def test_half_precision_stays_within_bound(checkpoint_file: Path, tmp_path: Path) -> None:
    """The weights are in half precision too."""
    bundle = export(checkpoint_file, out=tmp_path / "half", precision="fp16")
    assert bundle.manifest.precision == "fp16"
    types = {t.data_type for t in onnx.load(bundle.model_path).graph.initializer}
    assert onnx.TensorProto.FLOAT16 in types
    assert "LayerNormFeedForward" in bundle.manifest.operators
    record = json.loads((bundle.path / "parity.json").read_text())
    assert max(case["error"] for case in record["cases"]) > 1e-6


_LAYER_OF_PYTORCH = """
from torch import nn

class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)

def make():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(nn.Embedding(50, 16), layer, Mean(), nn.Linear(16, 3))
"""


@pytest.mark.slow
def test_half_precision_pytorch_layer_runs(tmp_path: Path) -> None:
    """ONNX Runtime 1.31 crashed the process while it optimized this graph."""
    (tmp_path / "own.py").write_text(_LAYER_OF_PYTORCH)
    words = ["--factory", "own:make", "--to", "onnx", "--precision", "fp16", "--out", "own.bundle"]
    outcome = run_python("-m", "aftexport", *words, cwd=tmp_path)
    assert outcome.code == 0, outcome.err


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_aft_full_with_rounded_products_passes(tmp_path: Path, precision: str) -> None:
    torch.manual_seed(0)
    config = ClassifierConfig(**tiny_models.CONFIG | {"mechanism": "aft_full", "max_length": 300})
    aftexport.save(
        tmp_path / "model.pt", model=DocumentClassifier(config), labels=tiny_models.LABELS
    )
    bundle = export(tmp_path / "model.pt", precision=precision)
    assert bundle.manifest.precision == precision
    record = json.loads((bundle.path / "parity.json").read_text())
    assert "AftFull" in {case["subject"] for case in record["cases"]}


def test_dropout_is_compared_in_evaluation_mode(tmp_path: Path) -> None:
    torch.save(tiny_models.Dropout().state_dict(), tmp_path / "model.pt")
    export(tmp_path / "model.pt", factory="tiny_models:Dropout")
    assert Bundle.open(tmp_path / "model.bundle").manifest.heads["logits"].names[0] == "class_0"


@pytest.mark.parametrize(
    ("factory", "named"),
    [
        ("tiny_models:DropoutAlwaysOn", ("random", "dropout")),
        ("tiny_models:RunningMean", ("changes the buffer running", "self.training")),
    ],
)
def test_incomparable_forward_is_refused(
    factory: str, named: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--factory", factory, "--to", "onnx", "--out", tmp_path / "b"]
    assert_refused(run_here(words, capsys), *named)
    assert not listing(tmp_path)


def test_module_of_fixed_types_keeps_types(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report also names parameters that are left out. None of this needs a comparison."""
    words = ["--factory", "tiny_models:FixedType", "--to", "onnx", "-v", "--out", tmp_path / "b"]
    outcome = run_here(words, capsys)
    assert (outcome.code, outcome.err) == (0, "")
    assert "PyTorch ran in float32, because" in outcome.out
    assert "reference in float32" in " ".join(outcome.out.split())
    assert "Left out, at its default: attention_mask." in outcome.out
    assert Bundle.open(tmp_path / "b").manifest.reference == "float32"
    assert json.loads((tmp_path / "b" / "parity.json").read_text())["reference"] == "float32"
    page = (tmp_path / "b" / "parity.html").read_text("utf-8")
    assert "compared with PyTorch in float32" in page
    assert "PyTorch ran in float32, because" in page
    assert run_here([*words, "--force", "--no-verify"], capsys).code == 0
    verified = run_here(["verify", tmp_path / "b", "--factory", "tiny_models:FixedType"], capsys)
    assert verified.code == 0
    assert "reference in float32" in " ".join(verified.out.split())


def test_module_with_nan_weights_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--factory",
        "tiny_models:NotANumber",
        "--to",
        "onnx",
        "--out",
        tmp_path / "b",
        "--no-verify",
    ]
    assert_refused(run_here(words, capsys), "NaN", "head.bias")
    torch.save(tiny_models.NotANumber(), tmp_path / "model.pt")
    words = [tmp_path / "model.pt", "--to", "onnx", "--allow-pickle", "--no-verify"]
    refused = run_here(words, capsys)
    assert (refused.code, "NaN in head.bias" in refused.err) == (2, True)


def test_pickled_module_exports_when_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(tiny_models.Bag(), tmp_path / "model.pt")
    outcome = run_here([tmp_path / "model.pt", "--to", "onnx", "--allow-pickle"], capsys)
    assert outcome.code == 0, outcome.err
    assert "runs the code in" in outcome.err
    assert Bundle.open(tmp_path / "model.bundle").manifest.source["kind"] == "pickled module"


def test_live_module_is_exported_and_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny_models.Bag()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    bundle = aftexport.export(
        model,
        labels=("x", "y", "z"),
        tokenizer=tiny_models.byte_tokenizer(),
        task="multi_label_classification",
    )
    assert bundle.path == Path("Bag.bundle")
    assert "Next: aftserve Bag.bundle" in capsys.readouterr().out
    head = bundle.manifest.heads["logits"]
    assert (head.task, head.names) == ("multi_label_classification", ("x", "y", "z"))
    assert (bundle.path / "tokenizer.json").is_file()
    assert model.training
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("option", [{"labels": "abc"}, {"tokenizer": 3}])
def test_wrong_object_as_option_is_refused(option: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=next(iter(option))):
        aftexport.export(tiny_models.Bag(), out=tmp_path / "b", **option)
    assert listing(tmp_path) == {}


def test_bundle_as_model_names_what_opens_it(bundle_folder: Path) -> None:
    for function in (aftexport.export, aftexport.load):
        with pytest.raises(CheckpointError, match=r"a bundle, .*aftserve .*aftserve\.Predictor\("):
            function(bundle_folder)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("ShapeBranch", "branches"),
        ("ValueBranch", "branches"),
        ("OtherArguments", "forward"),
        ("NoEmbedding", "embedding"),
        ("Pair", ""),
        ("LogitsByToken", "logits"),
    ],
)
def test_unexportable_module_is_refused(
    factory: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(getattr(tiny_models, factory)().state_dict(), tmp_path / "model.pt")
    before = listing(tmp_path)
    words = [tmp_path / "model.pt", "--to", "onnx", "--factory", f"tiny_models:{factory}"]
    assert_refused(run_here(words, capsys), said)
    assert listing(tmp_path) == before


def test_failing_graph_is_refused_with_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch does not fail at this size."""

    class Squeezed(tiny_models.Bag):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(input_ids).squeeze(1)
            return self.head(x.reshape(input_ids.shape[0], -1, 16).mean(1))

    monkeypatch.setattr(tiny_models, "Squeezed", Squeezed, raising=False)
    words = ["--to", "onnx", "--factory", "tiny_models:Squeezed", "--out", tmp_path / "b"]
    assert_refused(
        run_here(words, capsys), "fails on input_ids [1, 1024], which PyTorch accepts", "squeeze()"
    )
    assert not listing(tmp_path)


@pytest.mark.table(keep=0.3, by=any_case)
@pytest.mark.parametrize("labels", ["abc", [1, 2, 3], ["a", "b", "\udce4"]])
def test_malformed_labels_are_refused(labels: Any, checkpoint_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="labels must be"):
        export(checkpoint_file, out=tmp_path / "b", labels=labels)
    assert not list(tmp_path.iterdir())


def test_parity_error_names_long_document(bundle_folder: Path) -> None:
    """The bundle does not keep that case."""
    bundle = Bundle.open(bundle_folder)
    case = replace(bundle.golden()[0], name="beyond 65,536 tokens")
    furthest = compare(case, {n: x + 1 for n, x in case.outputs.items()}, "fp16")[0]
    assert "case 'beyond 65,536 tokens'" in str(parity_error(furthest, bundle, "fp16"))


class BranchBeforeLgamma(tiny_models.Bag):
    """Up to 25 tokens it can be captured, but not translated."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        return self.head(torch.lgamma(x if input_ids.shape[1] > 25 else x * 2).mean(1))


class OffsetPositions(tiny_models.Bag):
    """Positions as RoBERTa computes them: 30 rows are enough for 28 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.nn.Embedding(30, 16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        places = torch.ones_like(input_ids).cumsum(1) + 1
        return self.head((self.embedding(input_ids) + self.positions(places)).mean(1))


class FarToken(OffsetPositions):
    """Reads a token that short documents lack, so that no maximum length is enough."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        place = torch.clamp(input_ids[:, :1] - 200, min=0)
        return super().forward(input_ids) + input_ids.gather(1, place)


def test_length_is_tried_before_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="branch at 25 tokens") as refused:
        export(factory=f"{__name__}:BranchBeforeLgamma", out=tmp_path / "b")
    assert "--max-length" not in str(refused.value)


def test_length_of_computed_positions_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"up to 28 tokens only\. Add --max-length 28\."):
        export(factory=f"{__name__}:OffsetPositions", out=tmp_path / "b")
    bundle = export(factory=f"{__name__}:OffsetPositions", out=tmp_path / "b", max_length=28)
    assert bundle.manifest.max_tokens == 28


def test_length_that_fails_is_tried_once(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="index out of range") as refused:
        export(factory=f"{__name__}:FarToken", out=tmp_path / "b")
    assert "--max-length" not in str(refused.value)


class WindowsOfLibraryModel(tiny_models.Bag):
    """A model of the library for windows of a document, whose own maximum is 8 tokens."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=300,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
        )
        self.encoder = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder.embeddings.word_embeddings(input_ids).mean(1))


def test_part_for_windows_sets_no_limit(tmp_path: Path) -> None:
    bundle = export(factory=f"{__name__}:WindowsOfLibraryModel", out=tmp_path / "b")
    assert bundle.manifest.max_tokens is None


def test_cheap_checks_come_before_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(*_: Any, **__: Any) -> None:
        pytest.fail("the model was captured first")

    monkeypatch.setattr("aftexport.pipeline.trace.capture", captured)
    tokenizer = tmp_path / "tokenizer.json"
    words = {str(number): number for number in range(400)}
    Tokenizer(models.WordLevel(words, unk_token="0")).save(str(tokenizer))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tokenizer": tokenizer}, "ids must be below the model's 300, got 399"),
        ({"labels": ["a"]}, "different labels"),
        ({"task": "token_classification"}, "for token_classification"),
        ({"opset": 99}, "--opset must be 18"),
        ({"heads": tmp_path / "absent"}, "absent cannot be read"),
    ]
    for options, message in wrong:
        with pytest.raises(UsageError, match=message):
            export(factory="tiny_models:Bag", out=tmp_path / "b", **options)


@pytest.mark.slow
def test_padding_of_library_model_is_its_own(tmp_path: Path) -> None:
    """GPT-2 searches for the token before the padding; a wrapper gives it ids and a mask."""
    bundle = export(factory=f"{__name__}:wrapped_library_model", out=tmp_path / "b")
    assert bundle.manifest.inputs == ("input_ids", "lengths")
    assert bundle.manifest.max_tokens == 40


class Wrapped(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids, attention_mask=attention_mask).logits
        return logits


def wrapped_library_model() -> Wrapped:
    import transformers

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 40, "vocab_size": 30}
    config = transformers.GPT2Config(**sizes, num_labels=3, pad_token_id=3)
    return Wrapped(transformers.GPT2ForSequenceClassification(config))
