import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import safetensors.torch
import tiny_models
import torch
from bad_models import BAD_MODELS, Hostile, config, holding, model_folder
from commands import assert_refused, listing, run_here, run_python, within
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import aftexport
from aftexport.checkpoint import load
from aftexport.errors import AftexportError, CheckpointError, UsageError
from aftexport.nn import ClassifierConfig, DocumentClassifier

SOME = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_bad_model_is_refused_without_files(
    kind: str, tmp_path: Path, checkpoint_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build, reasons = BAD_MODELS[kind]
    model = build(tmp_path, checkpoint_file)
    before = listing(tmp_path)
    outcome = run_here([model, "--to", "onnx", "--out", tmp_path / "out"], capsys)
    assert_refused(outcome, model.name, *reasons)
    assert "--allow-pickle" not in outcome.err or "--allow-pickle" in reasons
    assert "Check its permissions" not in outcome.err
    assert listing(tmp_path) == before


def test_config_deeper_than_weights_is_refused(tmp_path: Path, checkpoint_file: Path) -> None:
    """A configuration far deeper than its weights is refused at once."""
    model = config(depth=20_000)(tmp_path, checkpoint_file)
    with within(5), pytest.raises(CheckpointError):
        load(model)


def test_load_reads_saved_model(classifier: DocumentClassifier, checkpoint_file: Path) -> None:
    read = load(checkpoint_file)
    assert read.kind == "aftexport checkpoint"
    assert read.labels == tiny_models.LABELS
    assert read.tokenizer == tiny_models.byte_tokenizer().to_str()
    assert isinstance(read.module, DocumentClassifier)
    assert read.module.config == classifier.config
    for name, tensor in classifier.state_dict().items():
        torch.testing.assert_close(read.module.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("labels", [["a", "b"], ["a", "b", "b"], ["a", "b", ""], "abc", [1, 2, 3]])
def test_save_with_wrong_labels_keeps_file(
    labels: list[str], classifier: DocumentClassifier, tmp_path: Path
) -> None:
    """Save refuses labels that do not fit and keeps the file that is there."""
    path = tmp_path / "model.pt"
    path.write_bytes(b"before")
    with pytest.raises(UsageError, match="label"):
        aftexport.save(path, model=classifier, labels=labels)
    assert listing(tmp_path).keys() == {"model.pt"}
    assert path.read_bytes() == b"before"


def test_save_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"got a Bag.*--factory package"):
        aftexport.save(tmp_path / "model.pt", model=tiny_models.Bag(), labels=["a", "b"])  # type: ignore[arg-type]
    assert listing(tmp_path) == {}


def test_folder_of_config_and_safetensors_loads(tmp_path: Path, checkpoint_file: Path) -> None:
    read = load(model_folder()(tmp_path, checkpoint_file))
    assert read.labels == tiny_models.LABELS
    assert read.tokenizer is not None
    assert read.module is not None


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_state_dict_loads_into_factory_module(name: str, wrapped: bool, tmp_path: Path) -> None:
    trained = tiny_models.Bag()
    torch.nn.init.constant_(trained.head.bias, 7)
    path, state = tmp_path / name, trained.state_dict()
    if name.endswith(".pt"):
        torch.save({"state_dict": state} if wrapped else state, path)
    else:
        safetensors.torch.save_file(state, path)
    module = load(path, factory="tiny_models:Bag").module
    assert isinstance(module, tiny_models.Bag)
    assert module.head.bias.tolist() == [7, 7, 7]


@pytest.mark.slow
def test_pickled_module_imports_from_working_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\nclass Mine(torch.nn.Linear): pass\n")
    save = "import torch, mine; torch.save(mine.Mine(2, 2), 'model.pt')"
    assert run_python("-c", save, cwd=tmp_path).code == 0
    command = "import sys; sys.path.remove(''); from aftexport.cli import main; sys.exit(main())"
    words = ("-c", command, "inspect", "model.pt", "--allow-pickle")
    outcome = run_python(*words, cwd=tmp_path)
    assert (outcome.code, "pickled module" in outcome.out) == (0, True), outcome.err


def test_unneeded_factory_is_refused(tmp_path: Path, checkpoint_file: Path) -> None:
    torch.save(tiny_models.Bag(), tmp_path / "model.pt")
    for path in (tmp_path / "model.pt", checkpoint_file):
        with pytest.raises(UsageError, match=r"got --factory tiny_models:Bag for .*Omit"):
            load(path, factory="tiny_models:Bag", allow_pickle=True)


def test_folder_with_factory_is_refused(tmp_path: Path, checkpoint_file: Path) -> None:
    folder = model_folder()(tmp_path, checkpoint_file)
    with pytest.raises(UsageError, match=r"got --factory .*give the file model\.safetensors"):
        load(folder, factory="tiny_models:Bag")


def test_shard_index_is_refused_like_folder(tmp_path: Path) -> None:
    """The index file of a state dict in shards is refused as its folder is."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    for path in (index, tmp_path):
        with pytest.raises(CheckpointError, match=r"in several files.*Join them"):
            load(path, factory="tiny_models:Bag")


def test_pickled_module_loads_only_when_allowed(tmp_path: Path) -> None:
    """Loading also warns that a pickle runs code."""
    path = tmp_path / "model.pt"
    torch.save(tiny_models.Bag(), path)
    with pytest.raises(CheckpointError, match="--allow-pickle"):
        load(path)
    with pytest.warns(UserWarning, match="runs the code in"):
        assert isinstance(load(path, allow_pickle=True).module, tiny_models.Bag)


def test_allowed_pickle_is_refused_for_plain_file(tmp_path: Path, checkpoint_file: Path) -> None:
    torch.save(tiny_models.Bag().state_dict(), tmp_path / "state.pt")
    for path, factory in (
        (checkpoint_file, None),
        (tmp_path / "state.pt", "tiny_models:Bag"),
    ):
        with pytest.raises(UsageError, match="only for a pickled file"):
            load(path, factory=factory, allow_pickle=True)


def test_pickle_without_module_is_refused(tmp_path: Path) -> None:
    """It is refused even where pickles are allowed."""
    torch.save(Hostile(tmp_path), tmp_path / "model.pt")
    with (
        pytest.warns(UserWarning, match="runs the code in"),
        pytest.raises(CheckpointError, match="expected a module"),
    ):
        load(tmp_path / "model.pt", allow_pickle=True)


def test_text_file_warning_omits_pickles(tmp_path: Path) -> None:
    path = holding(b"plain text\n" * 9)(tmp_path, tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        load(path, allow_pickle=True)
    assert "pickle" not in str(refusal.value)


def test_python_file_names_factory(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import torch\n")
    with pytest.raises(CheckpointError, match="--factory mine:NAME"):
        load(path)


def refused_or_read(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with contextlib.suppress(AftexportError):
        load(path)


starts = st.sampled_from([b"", b"\x80\x02", b"\x80\x02}", b"PK\x03\x04", b"\x08\0\0\0\0\0\0\0{}"])
names = st.sampled_from(["model.pt", "model.pt2", "model.safetensors", "model.bin"])


@pytest.mark.filterwarnings("ignore")
@given(start=starts, rest=st.binary(max_size=80), name=names)
@SOME
def test_random_bytes_give_no_traceback(
    start: bytes, rest: bytes, name: str, tmp_path: Path
) -> None:
    refused_or_read(tmp_path / name, start + rest)


@pytest.mark.filterwarnings("ignore")
@given(position=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255), zipped=st.booleans())
@SOME
def test_changed_byte_gives_no_traceback(
    position: float, value: int, zipped: bool, tmp_path: Path
) -> None:
    state = {"weight": torch.arange(12.0), "bias": torch.ones(3)}
    torch.save(state, tmp_path / "good.pt", _use_new_zipfile_serialization=zipped)
    content = bytearray((tmp_path / "good.pt").read_bytes())
    content[int(position * len(content))] = value
    refused_or_read(tmp_path / "model.pt", bytes(content))


@pytest.mark.filterwarnings("ignore")
@given(part=st.floats(0, 1, exclude_max=True), zipped=st.booleans())
@SOME
def test_cut_file_gives_no_traceback(part: float, zipped: bool, tmp_path: Path) -> None:
    state = {"weight": torch.arange(12.0), "bias": torch.ones(3)}
    torch.save(state, tmp_path / "good.pt", _use_new_zipfile_serialization=zipped)
    content = (tmp_path / "good.pt").read_bytes()
    refused_or_read(tmp_path / "model.pt", content[: int(part * len(content))])


@pytest.mark.parametrize(
    "factory",
    [
        "tiny_models",
        ":Bag",
        "tiny_models:",
        ".tiny_models:Bag",
        "tiny_models:Absent",
        "no_such_module:make",
        "tiny_models:raising",
        "tiny_models:exiting",
        "tiny_models:number",
        "tiny_models:VOCABULARY",
        "tiny_models:AftSimple",
        "factory_with_syntax_error:make",
        "factory_that_divides_by_zero:make",
    ],
)
def test_bad_factory_is_refused(
    factory: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "factory_with_syntax_error.py").write_text("def (")
    (tmp_path / "factory_that_divides_by_zero.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    torch.save(tiny_models.Bag().state_dict(), tmp_path / "model.pt")
    before = listing(tmp_path)
    outcome = run_here([tmp_path / "model.pt", "--to", "onnx", "--factory", factory], capsys)
    assert_refused(outcome, "--factory", factory)
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("factory", "remedy"),
    [
        ("tiny_models:AftSimple", "without required arguments"),
        ("tiny_models:raising", r"from tiny_models import raising; raising\(\)"),
    ],
)
def test_raising_factory_differs_from_missing_arguments(factory: str, remedy: str) -> None:
    """The error tells a factory that raises from one that needs arguments."""
    with pytest.raises(UsageError, match=remedy):
        load(factory=factory)


@pytest.mark.parametrize("model", [tiny_models.Bag(), tiny_models.Bag, lambda: tiny_models.Bag()])
def test_module_and_callable_load_without_file(model: Callable[[], nn.Module]) -> None:
    assert isinstance(load(model).module, tiny_models.Bag)
    assert isinstance(load(factory=model).module, tiny_models.Bag)


def test_callable_builds_module_of_state_dict(tmp_path: Path) -> None:
    torch.save(tiny_models.Bag().state_dict(), tmp_path / "model.pt")
    assert load(tmp_path / "model.pt", factory=tiny_models.Bag).kind == "state dict for Bag"
    with pytest.raises(UsageError, match="give it without the file"):
        load(tmp_path / "model.pt", factory=tiny_models.Bag())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (tiny_models.Bag().state_dict(), "load_state_dict"),
        (onnx.ModelProto(), "onnx.save"),
        (torch.zeros(2), "got an object of type Tensor"),
        (nn.Linear, "Give the module itself"),
        (dict, "must return an nn.Module, got a dict"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_object_is_refused(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load(given)


@pytest.mark.parametrize("mechanism", ["retention", "lightning_attention", "gated_delta_net"])
def test_loaded_model_equals_saved_one(mechanism: str, tmp_path: Path) -> None:
    """A loaded model starts without numbers, so those of fixed decays come from the file too."""
    config = ClassifierConfig(
        vocab_size=30, num_labels=3, dim=16, depth=1, num_heads=2, ffn_dim=32, mechanism=mechanism
    )
    model = DocumentClassifier(config).eval()
    aftexport.save(tmp_path / "model.pt", model=model)
    loaded = aftexport.load(tmp_path / "model.pt").module
    assert loaded is not None
    ids, lengths = torch.randint(1, 30, (2, 9)), torch.tensor([9, 4])
    assert torch.equal(loaded(ids, lengths), model(ids, lengths))
