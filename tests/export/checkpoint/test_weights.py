import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tiny_models
import torch
from bad_models import weight
from torch.nn.utils import prune

from aftexport.checkpoint import load
from aftexport.errors import CheckpointError


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
    module = load(tmp_path / "model.pt", factory="tiny_models:Bag").module
    assert isinstance(module, tiny_models.Bag)
    assert torch.equal(module.head.bias, trained.head.bias)


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
        module = load("model.pt", factory="tiny_models:Bag").module
    assert isinstance(module, tiny_models.Bag)
    assert torch.equal(module.head.bias, trained.head.bias)
    command = str(said[0].message).partition("export the latter: ")[2].removesuffix(".")
    exec(command, {"torch": torch})
    other = load("other.pt", factory="tiny_models:Bag").module
    assert isinstance(other, tiny_models.Bag)
    assert torch.equal(other.head.bias, averaged.head.bias)


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
    read = load(path, factory="tiny_models:Bag").module
    assert isinstance(read, tiny_models.Bag)
    assert torch.equal(read.head.weight, model.head.weight)
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
