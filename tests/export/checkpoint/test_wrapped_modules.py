"""Weights of modules that training wraps: compiled, parallel, averaged, or with low-rank parts."""

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch.optim.swa_utils import AveragedModel

from aftexport.checkpoint import load
from aftexport.errors import CheckpointError


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "model."])
def test_weights_of_wrapped_module_are_read(prefix: str, tmp_path: Path) -> None:
    trained = tiny_models.Bag()
    state = {prefix + name: weight for name, weight in trained.state_dict().items()}
    torch.save(state, tmp_path / "model.pt")
    module = load(str(tmp_path / "model.pt"), factory="tiny_models:Bag").module
    assert isinstance(module, tiny_models.Bag)
    assert torch.equal(module.head.weight, trained.head.weight)


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
        module = load(tmp_path / "model.pt", factory="tiny_models:Bag").module
    assert isinstance(module, tiny_models.Bag)
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
    module = load(tmp_path / "model.pt", factory="tiny_models:build").module
    assert isinstance(module, tiny_models.Bag)
    assert module.head.bias.tolist() == [7, 7, 7]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("wrap", [lambda module: module, torch.compile])
def test_weights_of_averaged_module_are_read(wrap: Any, tmp_path: Path) -> None:
    trained = tiny_models.Bag()
    torch.save(wrap(AveragedModel(trained)).state_dict(), tmp_path / "model.pt")
    module = load(tmp_path / "model.pt", factory="tiny_models:Bag").module
    assert isinstance(module, tiny_models.Bag)
    assert torch.equal(module.head.weight, trained.head.weight)


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
