import contextlib
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import toy
from bad_models import BAD_MODELS, Hostile, config, holding, model_folder, weight
from commands import assert_refused, listing, run_here, run_python, within
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.optim.swa_utils import AveragedModel

import aftexport
from aftexport.checkpoint import from_factory, load
from aftexport.errors import AftexportError, CheckpointError, UsageError
from aftexport.nn import DocumentClassifier

SOME = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_a_bad_model_is_refused_by_name_and_leaves_nothing(
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


def test_a_configuration_far_deeper_than_its_weights_is_refused_at_once(
    tmp_path: Path, checkpoint_file: Path
) -> None:
    model = config(depth=20_000)(tmp_path, checkpoint_file)
    with within(5), pytest.raises(CheckpointError):
        load(model)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float64])
def test_a_weight_of_another_type_is_read_in_float32(
    dtype: torch.dtype, tmp_path: Path, checkpoint_file: Path
) -> None:
    model = weight("head.bias", lambda tensor: tensor.to(dtype))(tmp_path, checkpoint_file)
    read = load(model).module
    assert read is not None
    assert read.state_dict()["head.bias"].dtype == torch.float32


def test_what_save_writes_load_reads(classifier: DocumentClassifier, checkpoint_file: Path) -> None:
    read = load(checkpoint_file)
    assert read.kind == "aftexport checkpoint"
    assert read.labels == toy.LABELS
    assert read.tokenizer == toy.byte_tokenizer().to_str()
    assert isinstance(read.module, DocumentClassifier)
    assert read.module.config == classifier.config
    for name, tensor in classifier.state_dict().items():
        torch.testing.assert_close(read.module.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("labels", [["a", "b"], ["a", "b", "b"], ["a", "b", ""], "abc", [1, 2, 3]])
def test_save_refuses_labels_that_do_not_fit_and_keeps_the_file_there(
    labels: list[str], classifier: DocumentClassifier, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"before")
    with pytest.raises(UsageError, match="label"):
        aftexport.save(path, model=classifier, labels=labels)
    assert listing(tmp_path).keys() == {"model.pt"}
    assert path.read_bytes() == b"before"


def test_a_module_that_has_no_configuration_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"A Bag is no DocumentClassifier.*--factory package"):
        aftexport.save(tmp_path / "model.pt", model=toy.Bag(), labels=["a", "b"])  # type: ignore[arg-type]
    assert listing(tmp_path) == {}


def test_a_folder_of_config_and_safetensors_loads(tmp_path: Path, checkpoint_file: Path) -> None:
    read = load(model_folder()(tmp_path, checkpoint_file))
    assert read.labels == toy.LABELS
    assert read.tokenizer is not None
    assert read.module is not None


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_state_dict_loads_into_what_the_factory_builds(
    name: str, wrapped: bool, tmp_path: Path
) -> None:
    trained = toy.Bag()
    torch.nn.init.constant_(trained.head.bias, 7)
    path, state = tmp_path / name, trained.state_dict()
    if name.endswith(".pt"):
        torch.save({"state_dict": state} if wrapped else state, path)
    else:
        safetensors.torch.save_file(state, path)
    module = load(path, factory="toy:Bag").module
    assert isinstance(module, toy.Bag)
    assert module.head.bias.tolist() == [7, 7, 7]


@pytest.mark.parametrize("name", ["state_dict", "model_state_dict", "model", "net", "module"])
def test_the_weights_beside_an_optimizers_are_read(name: str, tmp_path: Path) -> None:
    trained = toy.Bag()
    torch.nn.init.constant_(trained.head.bias, 7)
    optimizer = torch.optim.Adam(trained.parameters())
    trained.head.bias.sum().backward()
    optimizer.step()
    content = {"epoch": 3, "optimizer": optimizer.state_dict(), "loss": torch.tensor(1.0)}
    torch.save(content | {name: trained.state_dict()}, tmp_path / "model.pt")
    module = load(tmp_path / "model.pt", factory="toy:Bag").module
    assert isinstance(module, toy.Bag)
    assert torch.equal(module.head.bias, trained.head.bias)


@pytest.mark.parametrize("name", ["state_dict_ema", "model_ema", "ema"])
def test_of_weights_beside_those_that_are_read_a_warning_says_how_to_take_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained, averaged = toy.Bag(), toy.Bag()
    torch.nn.init.constant_(averaged.head.bias, 7)
    torch.save({"state_dict": trained.state_dict(), name: averaged.state_dict()}, "model.pt")
    with pytest.warns(UserWarning, match=f"under state_dict are taken.*under {name}") as said:
        module = load("model.pt", factory="toy:Bag").module
    assert isinstance(module, toy.Bag)
    assert torch.equal(module.head.bias, trained.head.bias)
    command = str(said[0].message).partition("export those: ")[2].removesuffix(".")
    exec(command, {"torch": torch})
    other = load("other.pt", factory="toy:Bag").module
    assert isinstance(other, toy.Bag)
    assert torch.equal(other.head.bias, averaged.head.bias)


def test_weights_that_are_not_found_or_found_twice_are_refused_by_their_names(
    tmp_path: Path,
) -> None:
    path, state = tmp_path / "model.pt", toy.Bag().state_dict()
    for content, reason in (
        ({"epoch": 3, "generator": state}, "without weights; it has 'epoch', 'generator'"),
        ({"model": state, "net": state}, "weights under model, net"),
        ({"epoch": 3, "model": {}}, "empty"),
        ([state], "a list, not a model"),
    ):
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=reason):
            load(path, factory="toy:Bag")


@pytest.mark.parametrize(
    "factory",
    [
        "toy",
        ":Bag",
        "toy:",
        ".toy:Bag",
        "toy:Absent",
        "no_such_module:make",
        "toy:raising",
        "toy:exiting",
        "toy:number",
        "toy:VOCABULARY",
        "toy:AftSimple",
        "factory_with_syntax_error:make",
        "factory_that_divides_by_zero:make",
    ],
)
def test_a_bad_factory_is_refused_by_name(
    factory: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "factory_with_syntax_error.py").write_text("def (")
    (tmp_path / "factory_that_divides_by_zero.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    torch.save(toy.Bag().state_dict(), tmp_path / "model.pt")
    before = listing(tmp_path)
    outcome = run_here([tmp_path / "model.pt", "--to", "onnx", "--factory", factory], capsys)
    assert_refused(outcome, "--factory", factory)
    assert listing(tmp_path) == before


def test_weights_for_another_module_are_listed_by_name(tmp_path: Path) -> None:
    torch.save(toy.Bag().state_dict(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"missing weights: positions\.weight"):
        load(tmp_path / "model.pt", factory="toy:Positions")


def test_a_weight_with_two_names_is_read_by_one(tmp_path: Path) -> None:
    trained = toy.Tied()
    torch.nn.init.constant_(trained.head.bias, 7)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_model(trained, str(path))
    assert len(safetensors.torch.load_file(path)) < len(trained.state_dict())
    module = load(path, factory="toy:Tied").module
    assert isinstance(module, toy.Tied)
    assert module.head.bias.tolist() == module.again.bias.tolist() == [7, 7, 7]


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "model."])
def test_the_weights_of_a_wrapped_module_are_read(prefix: str, tmp_path: Path) -> None:
    trained = toy.Bag()
    state = {prefix + name: weight for name, weight in trained.state_dict().items()}
    torch.save(state, tmp_path / "model.pt")
    module = load(str(tmp_path / "model.pt"), factory="toy:Bag").module
    assert isinstance(module, toy.Bag)
    assert torch.equal(module.head.weight, trained.head.weight)


@pytest.mark.parametrize("prefix", ["module.", "model."])
def test_what_stands_before_some_names_alone_is_no_wrapper(prefix: str, tmp_path: Path) -> None:
    state = {prefix + name: weight for name, weight in toy.Bag().state_dict().items()}
    state["head.bias"] = state.pop(prefix + "head.bias")
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="missing weights"):
        load(tmp_path / "model.pt", factory="toy:Bag")


def test_what_a_trainer_keeps_beside_the_module_is_left_out_with_a_warning(tmp_path: Path) -> None:
    trained = toy.Bag()
    state = {f"net.model.{name}": weight for name, weight in trained.state_dict().items()}
    beside = {"criterion.weight": torch.ones(3), "metrics.confusion": torch.ones(3, 3)}
    torch.save({"state_dict": state | beside}, tmp_path / "model.pt")
    with pytest.warns(UserWarning, match=r"under net\.model\..*criterion.weight, metrics.conf"):
        module = load(tmp_path / "model.pt", factory="toy:Bag").module
    assert isinstance(module, toy.Bag)
    assert torch.equal(module.head.weight, trained.head.weight)


def test_weights_of_several_modules_are_refused_by_what_holds_them(tmp_path: Path) -> None:
    state = toy.Bag().state_dict()
    both = {f"{part}.{name}": state[name] for part in ("student", "teacher") for name in state}
    torch.save(both, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"under student\., teacher\..*of one of them alone"):
        load(tmp_path / "model.pt", factory="toy:Bag")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("trained_compiled", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_part_may_be_compiled_where_it_was_trained_and_where_it_is_read(
    trained_compiled: bool, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = toy.Bag()
    torch.nn.init.constant_(trained.head.bias, 7)
    if trained_compiled:
        trained.head = torch.compile(trained.head)
    torch.save(trained.state_dict(), tmp_path / "model.pt")

    def build() -> toy.Bag:
        module = toy.Bag()
        if compiled:
            module.head = torch.compile(module.head)
        return module

    monkeypatch.setattr(toy, "build", build, raising=False)
    module = load(tmp_path / "model.pt", factory="toy:build").module
    assert isinstance(module, toy.Bag)
    assert module.head.bias.tolist() == [7, 7, 7]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("wrap", [lambda module: module, torch.compile])
def test_the_weights_of_an_averaged_module_are_read(wrap: Any, tmp_path: Path) -> None:
    trained = toy.Bag()
    torch.save(wrap(AveragedModel(trained)).state_dict(), tmp_path / "model.pt")
    module = load(tmp_path / "model.pt", factory="toy:Bag").module
    assert isinstance(module, toy.Bag)
    assert torch.equal(module.head.weight, trained.head.weight)


def test_a_mask_may_be_infinite_where_the_modules_own_is(tmp_path: Path) -> None:
    path, state = tmp_path / "model.pt", toy.Tied().state_dict()
    torch.save(state, path)
    module = load(path, factory="toy:Tied").module
    assert isinstance(module, toy.Tied)
    assert torch.equal(module.mask, state["mask"])
    for wrong in (torch.nan, torch.inf):
        state["mask"] = state["mask"].clone()
        state["mask"][0, 1] = wrong
        torch.save(state, path)
        with pytest.raises(CheckpointError, match="mask"):
            load(path, factory="toy:Tied")


def test_a_pickled_module_is_imported_from_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\nclass Mine(torch.nn.Linear): pass\n")
    save = "import torch, mine; torch.save(mine.Mine(2, 2), 'model.pt')"
    assert run_python("-c", save, cwd=tmp_path).code == 0
    command = "import sys; sys.path.remove(''); from aftexport.cli import main; sys.exit(main())"
    words = ("-c", command, "inspect", "model.pt", "--allow-pickle")
    outcome = run_python(*words, cwd=tmp_path)
    assert (outcome.code, "pickled module" in outcome.out) == (0, True), outcome.err


def test_a_factory_that_nothing_needs_is_refused_by_name(
    tmp_path: Path, checkpoint_file: Path
) -> None:
    torch.save(toy.Bag(), tmp_path / "model.pt")
    for path in (tmp_path / "model.pt", checkpoint_file):
        with pytest.raises(UsageError, match=r"needs no factory\. Leave toy:Bag out"):
            load(path, factory="toy:Bag", allow_pickle=True)


def test_a_folder_with_a_factory_is_refused_with_what_to_give(
    tmp_path: Path, checkpoint_file: Path
) -> None:
    folder = model_folder()(tmp_path, checkpoint_file)
    with pytest.raises(UsageError, match=r"needs no factory.*give the file model\.safetensors"):
        load(folder, factory="toy:Bag")


def test_the_list_of_a_state_dict_in_shards_is_refused_as_its_folder_is(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    for path in (index, tmp_path):
        with pytest.raises(CheckpointError, match=r"in several files.*Join them"):
            load(path, factory="toy:Bag")


@pytest.mark.parametrize(
    ("factory", "remedy"),
    [
        ("toy:AftSimple", "needs no arguments"),
        ("toy:raising", r"from toy import raising; raising\(\)"),
    ],
)
def test_a_factory_that_raises_is_told_from_one_that_needs_arguments(
    factory: str, remedy: str
) -> None:
    with pytest.raises(UsageError, match=remedy):
        from_factory(factory)


def test_a_pickled_module_loads_only_when_allowed_and_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(toy.Bag(), path)
    with pytest.raises(CheckpointError, match="--allow-pickle"):
        load(path)
    with pytest.warns(UserWarning, match="runs whatever code"):
        assert isinstance(load(path, allow_pickle=True).module, toy.Bag)


@pytest.mark.filterwarnings("ignore:.*runs whatever code")
def test_a_module_without_its_numbers_is_refused_by_name(tmp_path: Path) -> None:
    torch.save(toy.Bag().to("meta"), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"meta.*head\.bias"):
        load(tmp_path / "model.pt", allow_pickle=True)


@pytest.mark.filterwarnings("ignore:.*quantiz", "ignore:.*TypedStorage")
def test_a_quantized_module_is_refused_by_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def quantized() -> torch.nn.Module:
        return torch.ao.quantization.quantize_dynamic(toy.Bag(), {torch.nn.Linear})

    monkeypatch.setattr(toy, "quantized", quantized, raising=False)
    with pytest.raises(CheckpointError, match=r"tensors on the cpu: head\."):
        from_factory("toy:quantized")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel, AveragedModel])
def test_a_wrapped_module_is_read(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = toy.Bag()
    monkeypatch.setattr(toy, "wrapped", lambda: wrap(module), raising=False)
    found = from_factory("toy:wrapped").module
    assert type(found) is toy.Bag
    assert torch.equal(found.head.weight, module.head.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_module_that_shows_the_attributes_of_a_wrapped_one_is_read_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(toy.Bag())

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    monkeypatch.setattr(toy, "Outer", Outer, raising=False)
    assert type(from_factory("toy:Outer").module) is Outer


def test_a_pickle_that_is_no_module_is_refused_even_when_allowed(tmp_path: Path) -> None:
    torch.save(Hostile(tmp_path), tmp_path / "model.pt")
    with (
        pytest.warns(UserWarning, match="runs whatever code"),
        pytest.raises(CheckpointError, match="not a module"),
    ):
        load(tmp_path / "model.pt", allow_pickle=True)


def test_the_warning_for_a_text_file_is_not_about_pickles(tmp_path: Path) -> None:
    path = holding(b"plain text\n" * 9)(tmp_path, tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        load(path, allow_pickle=True)
    assert "pickle" not in str(refusal.value)


def refused_or_read(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with contextlib.suppress(AftexportError):
        load(path)


starts = st.sampled_from([b"", b"\x80\x02", b"\x80\x02}", b"PK\x03\x04", b"\x08\0\0\0\0\0\0\0{}"])
names = st.sampled_from(["model.pt", "model.pt2", "model.safetensors", "model.bin"])


@pytest.mark.filterwarnings("ignore")
@given(start=starts, rest=st.binary(max_size=80), name=names)
@SOME
def test_no_bytes_at_all_give_a_traceback(
    start: bytes, rest: bytes, name: str, tmp_path: Path
) -> None:
    refused_or_read(tmp_path / name, start + rest)


@pytest.mark.filterwarnings("ignore")
@given(position=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255), zipped=st.booleans())
@SOME
def test_a_changed_byte_never_gives_a_traceback(
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
def test_a_cut_file_never_gives_a_traceback(part: float, zipped: bool, tmp_path: Path) -> None:
    state = {"weight": torch.arange(12.0), "bias": torch.ones(3)}
    torch.save(state, tmp_path / "good.pt", _use_new_zipfile_serialization=zipped)
    content = (tmp_path / "good.pt").read_bytes()
    refused_or_read(tmp_path / "model.pt", content[: int(part * len(content))])
