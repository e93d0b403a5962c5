import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tiny_models
import torch
from bad_models import weight
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

from aftexport.checkpoint import load
from aftexport.errors import CheckpointError


def bag_in(path: Path | str, factory: str = "tiny_models:Bag") -> tiny_models.Bag:
    module = load(path, factory=factory).module
    assert isinstance(module, tiny_models.Bag)
    return module


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float64])
def test_weight_of_other_type_becomes_float32(
    dtype: torch.dtype, tmp_path: Path, checkpoint_file: Path
) -> None:
    model = weight("head.bias", lambda tensor: tensor.to(dtype))(tmp_path, checkpoint_file)
    read = load(model).module
    assert read is not None
    assert read.state_dict()["head.bias"].dtype == torch.float32


@pytest.mark.parametrize("name", ["state_dict", "model_state_dict", "model", "net", "module"])
def test_weights_beside_optimizer_are_read(name: str, tmp_path: Path) -> None:
    trained = tiny_models.Bag()
    torch.nn.init.constant_(trained.head.bias, 7)
    optimizer = torch.optim.Adam(trained.parameters())
    trained.head.bias.sum().backward()
    optimizer.step()
    content = {"epoch": 3, "optimizer": optimizer.state_dict(), "loss": torch.tensor(1.0)}
    torch.save(content | {name: trained.state_dict()}, tmp_path / "model.pt")
    assert torch.equal(bag_in(tmp_path / "model.pt").head.bias, trained.head.bias)


@pytest.mark.parametrize("name", ["state_dict_ema", "model_ema", "ema"])
def test_warning_says_how_to_take_others(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning says how to take the other sets of weights in the file."""
    monkeypatch.chdir(tmp_path)
    trained, averaged = tiny_models.Bag(), tiny_models.Bag()
    torch.nn.init.constant_(averaged.head.bias, 7)
    torch.save({"state_dict": trained.state_dict(), name: averaged.state_dict()}, "model.pt")
    with pytest.warns(UserWarning, match=f"under state_dict, .*under {name}") as said:
        module = bag_in("model.pt")
    assert torch.equal(module.head.bias, trained.head.bias)
    command = str(said[0].message).partition("export the latter: ")[2].removesuffix(".")
    exec(command, {"torch": torch})
    assert torch.equal(bag_in("other.pt").head.bias, averaged.head.bias)


def test_missing_and_duplicate_weights_are_named(
    tmp_path: Path,
) -> None:
    path, state = tmp_path / "model.pt", tiny_models.Bag().state_dict()
    for content, reason in (
        ({"epoch": 3, "generator": state}, "weights under generator, which is not a usual name"),
        ({"model": state, "net": state}, "weights under model, net"),
        ({"epoch": 3, "model": {}}, "empty"),
        ([state], "expected a model, got a list"),
    ):
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=reason):
            load(path, factory="tiny_models:Bag")


def test_weights_of_another_module_are_listed(tmp_path: Path) -> None:
    torch.save(tiny_models.Bag().state_dict(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"missing weights: positions\.weight"):
        load(tmp_path / "model.pt", factory="tiny_models:Positions")


def pruned(layer: torch.nn.Linear) -> torch.nn.Module:
    return prune.l1_unstructured(layer, "weight", 0.5)  # type: ignore[no-any-return]


IN_PARTS: dict[str, tuple[Any, str]] = {
    "weight norm": (
        torch.nn.utils.parametrizations.weight_norm,
        "parametrize.remove_parametrizations(model.head, 'weight')",
    ),
    "weight norm of old": (torch.nn.utils.weight_norm, "remove_weight_norm(model.head, 'weight')"),
    "spectral norm of old": (
        torch.nn.utils.spectral_norm,
        "remove_spectral_norm(model.head, 'weight')",
    ),
    "pruned": (pruned, "prune.remove(model.head, 'weight')"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("name", IN_PARTS)
def test_weight_in_parts_names_its_merge(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says how the parts of a weight become a whole one."""
    split, call = IN_PARTS[name]
    path = tmp_path / "model.pt"

    def in_parts() -> tiny_models.Bag:
        module = tiny_models.Bag()
        split(module.head)
        return module

    monkeypatch.setattr(tiny_models, "in_parts", in_parts, raising=False)
    model = in_parts()
    torch.save(model.state_dict(), path)
    with pytest.raises(CheckpointError) as refused:
        load(path, factory="tiny_models:Bag")
    assert f"Call torch.nn.utils.{call}" in refused.value.remedy
    assert load(path, factory="tiny_models:in_parts").module is not None

    exec(f"torch.nn.utils.{call}", {"torch": torch, "model": model})
    torch.save(model.state_dict(), path)
    assert torch.equal(bag_in(path).head.weight, model.head.weight)
    with pytest.raises(CheckpointError) as refused:
        load(path, factory="tiny_models:in_parts")
    assert f"Call torch.nn.utils.{call}, and so on, in the factory" in refused.value.remedy


def test_weight_with_two_names_reads_one(tmp_path: Path) -> None:
    trained = tiny_models.Tied()
    torch.nn.init.constant_(trained.head.bias, 7)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_model(trained, str(path))
    assert len(safetensors.torch.load_file(path)) < len(trained.state_dict())
    module = load(path, factory="tiny_models:Tied").module
    assert isinstance(module, tiny_models.Tied)
    assert module.head.bias.tolist() == module.again.bias.tolist() == [7, 7, 7]


def test_infinite_mask_follows_infinite_module_mask(tmp_path: Path) -> None:
    """A mask in the file may be infinite where the module's own mask is."""
    path, state = tmp_path / "model.pt", tiny_models.Tied().state_dict()
    torch.save(state, path)
    module = load(path, factory="tiny_models:Tied").module
    assert isinstance(module, tiny_models.Tied)
    assert torch.equal(module.mask, state["mask"])
    for wrong in (torch.nan, torch.inf):
        state["mask"] = state["mask"].clone()
        state["mask"][0, 1] = wrong
        torch.save(state, path)
        with pytest.raises(CheckpointError, match="mask"):
            load(path, factory="tiny_models:Tied")


@pytest.mark.filterwarnings("ignore:.*runs the code in")
def test_module_on_meta_device_is_refused(tmp_path: Path) -> None:
    torch.save(tiny_models.Bag().to("meta"), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"meta.*head\.bias"):
        load(tmp_path / "model.pt", allow_pickle=True)


@pytest.mark.filterwarnings("ignore:.*quantiz", "ignore:.*TypedStorage")
def test_quantized_module_is_refused_by_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def quantized() -> torch.nn.Module:
        return torch.ao.quantization.quantize_dynamic(tiny_models.Bag(), {torch.nn.Linear})

    monkeypatch.setattr(tiny_models, "quantized", quantized, raising=False)
    with pytest.raises(CheckpointError, match=r"tensors on the cpu: head\."):
        load(factory="tiny_models:quantized")


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda w: (w * 100).to(torch.int8), "before the quantization"),
        (lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8), "before the quantization"),
        (lambda w: w.to_sparse(), r"to_dense\(\)"),
        (lambda w: w.to(torch.complex64), "two real weights"),
        (lambda w: w.numpy(), r"torch\.as_tensor"),
        (lambda w: w.tolist(), r"torch\.as_tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(quantize|Sparse|sparse)")
def test_remedy_is_for_kind_of_weights(change: Any, remedy: str, tmp_path: Path) -> None:
    state = {name: change(w) for name, w in tiny_models.Bag().state_dict().items()}
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=remedy):
        load(tmp_path / "model.pt", factory="tiny_models:Bag")


def test_distributed_checkpoint_is_joined_first(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import format_utils, save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(
            {"model": tiny_models.Bag().state_dict()},
            checkpoint_id=tmp_path / "parts",
            no_dist=True,
        )
    for path in (tmp_path / "parts", next((tmp_path / "parts").glob("*.distcp"))):
        for factory in (None, "tiny_models:Bag"):
            with pytest.raises(CheckpointError, match=r"dcp_to_torch .*parts model\.pt"):
                load(path, factory=factory)
    format_utils.dcp_to_torch_save(tmp_path / "parts", tmp_path / "model.pt")
    assert load(tmp_path / "model.pt", factory="tiny_models:Bag").module is not None


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "model."])
def test_weights_of_wrapped_module_are_read(prefix: str, tmp_path: Path) -> None:
    trained = tiny_models.Bag()
    state = {prefix + name: weight for name, weight in trained.state_dict().items()}
    torch.save(state, tmp_path / "model.pt")
    assert torch.equal(bag_in(tmp_path / "model.pt").head.weight, trained.head.weight)


@pytest.mark.parametrize("prefix", ["module.", "model."])
def test_prefix_of_some_names_wraps_nothing(prefix: str, tmp_path: Path) -> None:
    """A prefix that only some names have is not taken for a wrapper."""
    state = {prefix + name: weight for name, weight in tiny_models.Bag().state_dict().items()}
    state["head.bias"] = state.pop(prefix + "head.bias")
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="missing weights"):
        load(tmp_path / "model.pt", factory="tiny_models:Bag")


def test_trainer_state_is_skipped_with_warning(tmp_path: Path) -> None:
    trained = tiny_models.Bag()
    state = {f"net.model.{name}": weight for name, weight in trained.state_dict().items()}
    beside = {"criterion.weight": torch.ones(3), "metrics.confusion": torch.ones(3, 3)}
    torch.save({"state_dict": state | beside}, tmp_path / "model.pt")
    with pytest.warns(UserWarning, match=r"under net\.model\..*criterion.weight, metrics.conf"):
        module = bag_in(tmp_path / "model.pt")
    assert torch.equal(module.head.weight, trained.head.weight)


def test_weights_of_several_modules_are_refused(tmp_path: Path) -> None:
    state = tiny_models.Bag().state_dict()
    both = {f"{part}.{name}": state[name] for part in ("student", "teacher") for name in state}
    torch.save(both, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"under student\., teacher\..*of only one of them"):
        load(tmp_path / "model.pt", factory="tiny_models:Bag")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("trained_compiled", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_part_is_read_either_way(
    trained_compiled: bool, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part may be compiled at training, at loading, or at both."""
    trained = tiny_models.Bag()
    torch.nn.init.constant_(trained.head.bias, 7)
    if trained_compiled:
        trained.head = torch.compile(trained.head)
    torch.save(trained.state_dict(), tmp_path / "model.pt")

    def build() -> tiny_models.Bag:
        module = tiny_models.Bag()
        if compiled:
            module.head = torch.compile(module.head)
        return module

    monkeypatch.setattr(tiny_models, "build", build, raising=False)
    assert bag_in(tmp_path / "model.pt", "tiny_models:build").head.bias.tolist() == [7, 7, 7]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("wrap", [lambda module: module, torch.compile])
def test_weights_of_averaged_module_are_read(wrap: Any, tmp_path: Path) -> None:
    trained = tiny_models.Bag()
    torch.save(wrap(AveragedModel(trained)).state_dict(), tmp_path / "model.pt")
    assert torch.equal(bag_in(tmp_path / "model.pt").head.weight, trained.head.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel, AveragedModel])
def test_a_wrapped_module_is_read(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_models.Bag()
    monkeypatch.setattr(tiny_models, "wrapped", lambda: wrap(module), raising=False)
    found = load(factory="tiny_models:wrapped").module
    assert type(found) is tiny_models.Bag
    assert torch.equal(found.head.weight, module.head.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_proxy_of_wrapped_module_loads_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The module shows the attributes of the module that it wraps."""

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(tiny_models.Bag())

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    monkeypatch.setattr(tiny_models, "Outer", Outer, raising=False)
    assert type(load(factory="tiny_models:Outer").module) is Outer


class Parts(tiny_models.Bag):
    """A module with what training wraps in parts, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(16, 16)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16)])
        self.tied = torch.nn.Linear(16, 16)
        self.tied.weight = self.module.weight
        self.register_buffer("positions", torch.arange(4.0), persistent=False)


def build_parts() -> Parts:
    module = Parts()
    torch.nn.init.constant_(module.head.bias, 7)
    return module


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setattr(tiny_models, "Parts", Parts, raising=False)
    return build_parts()


def assert_same_weights(
    path: Path, trained: torch.nn.Module, factory: str = "tiny_models:Parts"
) -> None:
    module = load(path, factory=factory).module
    assert module is not None
    torch.testing.assert_close(
        dict(module.state_dict()), dict(trained.state_dict()), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    "wrapper",
    ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module", "module"],
)
@pytest.mark.parametrize(
    ("part", "wrapped"),
    [
        ("", "{}."),
        ("", "model.{}."),
        ("layers.0.", "layers.0.{}."),
        ("layers.0.", "layers.0.{}._orig_mod."),
        ("module.", "module.{}."),
        ("layers.", "layers.{}."),
    ],
)
def test_wrappers_within_names_are_left_out(
    wrapper: str, part: str, wrapped: str, parts: Parts, tmp_path: Path
) -> None:
    """They wrap the whole, a part, or a part with the name module."""
    state = {
        wrapped.format(wrapper) + name.removeprefix(part) if name.startswith(part) else name: weight
        for name, weight in parts.state_dict().items()
    }
    torch.save(state, tmp_path / "model.pt")
    assert_same_weights(tmp_path / "model.pt", parts)


def test_computed_buffers_are_skipped(parts: Parts, tmp_path: Path) -> None:
    state = parts.state_dict() | {"positions": torch.zeros(9), "head._extra_state": None}
    del state["layers.1.num_batches_tracked"]
    torch.save(state, tmp_path / "model.pt")
    with pytest.warns(
        UserWarning, match=r"computes these buffers itself.*: positions, head\._extra"
    ):
        assert_same_weights(tmp_path / "model.pt", parts)


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
@pytest.mark.parametrize("parts_of", ["peft", "loralib", "adapter"])
def test_low_rank_parts_suggest_merging(prefix: str, parts_of: str, tmp_path: Path) -> None:
    state = {prefix + name: weight for name, weight in tiny_models.Bag().state_dict().items()}
    low = {f"{prefix}head.lora_{side}": torch.ones(4, 4) for side in "AB"}
    if parts_of != "loralib":
        low = {f"{name}.default.weight": weight for name, weight in low.items()}
        for name in ("weight", "bias"):
            state[f"{prefix}head.base_layer.{name}"] = state.pop(f"{prefix}head.{name}")
    torch.save(low if parts_of == "adapter" else state | low, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"merge_and_unload\(\)"):
        load(tmp_path / "model.pt", factory="tiny_models:Bag")


def test_flat_weights_suggest_saving_whole(tmp_path: Path) -> None:
    """The flat weights of one process are only a part of the model."""
    torch.save({"_fsdp_wrapped_module._flat_param": torch.ones(9)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="FULL_STATE_DICT"):
        load(tmp_path / "model.pt", factory="tiny_models:Bag")


def test_meta_module_gets_weights(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_storage() -> Parts:
        with torch.device("meta"):
            module = Parts()
        module.positions = torch.arange(4.0)
        return module

    monkeypatch.setattr(tiny_models, "without_storage", without_storage, raising=False)
    state = parts.state_dict()
    del state["tied.weight"]
    torch.save(state, tmp_path / "model.pt")
    assert_same_weights(tmp_path / "model.pt", parts, "tiny_models:without_storage")

    torch.save(parts.state_dict(), tmp_path / "model.pt")
    monkeypatch.setattr(tiny_models, "without_storage", lambda: Parts().to("meta"))
    with pytest.raises(CheckpointError, match=r"on the device meta.*: positions\. Make them"):
        load(tmp_path / "model.pt", factory="tiny_models:without_storage")
    with pytest.raises(CheckpointError, match="on the device meta"):
        load(factory="tiny_models:without_storage")
