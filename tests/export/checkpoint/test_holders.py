import argparse
import collections
import datetime
import pathlib
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from bad_models import MARKER, Hostile
from commands import listing, run_here

from aftexport.checkpoint import load
from aftexport.errors import CheckpointError


class Settings:
    """An object of a class that no list of harmless ones can know."""


def trained() -> tiny_models.Bag:
    module = tiny_models.Bag()
    torch.nn.init.constant_(module.head.bias, 7)
    return module


def assert_trained(module: object) -> None:
    assert isinstance(module, tiny_models.Bag)
    assert module.head.bias.tolist() == [7, 7, 7]


def optimizer() -> torch.optim.Optimizer:
    module = trained()
    found = torch.optim.AdamW(module.parameters())
    module.head.bias.sum().backward()
    found.step()
    return found


BESIDE: dict[str, Any] = {
    "numpy scalar": np.float64(0.5),
    "numpy array": np.arange(6).reshape(2, 3),
    "numpy text": np.array(["a", "b"]),
    "numpy dtype": np.dtype("float32"),
    "numpy random state": np.random.RandomState(0).get_state(),
    "numpy generator": np.random.default_rng(0),
    "namespace": argparse.Namespace(lr=0.1, path=pathlib.Path("/data")),
    "simple namespace": types.SimpleNamespace(a=1),
    "path": pathlib.Path("runs/1"),
    "Windows path": pathlib.PureWindowsPath("c:/runs"),
    "date": datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
    "duration": datetime.timedelta(seconds=3),
    "deque": collections.deque([1.0, 2.0], maxlen=5),
    "defaultdict": collections.defaultdict(list, a=[1]),
    "Counter": collections.Counter("abc"),
    "bytes": b"\x00\x01",
    "torch types": [torch.float16, torch.device("cpu"), torch.Size([2])],
    "optimizer": optimizer(),
    "schedule": torch.optim.lr_scheduler.StepLR(optimizer(), 3),
    "random states": [torch.get_rng_state(), __import__("random").getstate()],
}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler")
@pytest.mark.parametrize("name", BESIDE)
def test_harmless_objects_beside_weights_are_ignored(name: str, tmp_path: Path) -> None:
    content = {"epoch": 3, "model": trained().state_dict(), "beside": BESIDE[name]}
    torch.save(content, tmp_path / "model.pt")
    assert_trained(load(tmp_path / "model.pt", factory="tiny_models:Bag").module)


def test_names_of_other_numpy_are_ignored(tmp_path: Path) -> None:
    """numpy 1 writes numpy.core where numpy 2 writes numpy._core; both are 16 characters apart."""
    path = tmp_path / "model.pt"
    content = {"model": trained().state_dict(), "loss": np.float64(0.5)}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    written = path.read_bytes()
    core = b"numpy._core" if b"numpy._core" in written else b"numpy.core"
    other = {b"numpy._core": b"numpy.core", b"numpy.core": b"numpy._core"}[core]
    path.write_bytes(written.replace(core, other))
    assert_trained(load(path, factory="tiny_models:Bag").module)


def test_refused_class_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.pt"
    torch.save({"model": trained().state_dict(), "config": Settings()}, path)
    with pytest.raises(CheckpointError, match=r"run code when loaded: \S*Settings") as refused:
        load(path, factory="tiny_models:Bag")
    assert "--allow-pickle" in refused.value.remedy
    assert "--factory" not in refused.value.remedy  # it is given
    with pytest.warns(UserWarning, match="runs the code in"):
        read = load(path, factory="tiny_models:Bag", allow_pickle=True)
    assert_trained(read.module)
    assert read.kind == "pickled state dict for tiny_models:Bag"


def test_harmless_name_lets_no_code_run(tmp_path: Path) -> None:
    """Code that stands beside a harmless name does not run."""
    content = {"model": trained().state_dict(), "a": np.float64(1), "b": Hostile(tmp_path)}
    torch.save(content, tmp_path / "model.pt")
    before = listing(tmp_path)
    with pytest.raises(CheckpointError, match=r"run code when loaded: \w+\.mkdir"):
        load(tmp_path / "model.pt", factory="tiny_models:Bag")
    assert listing(tmp_path) == before
    assert MARKER not in before


def test_unsafe_pickle_protocol_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"model": trained().state_dict()}, path, pickle_protocol=4)
    with pytest.raises(CheckpointError, match=r"protocol is above 2\. .*without pickle_protocol"):
        load(path, factory="tiny_models:Bag")
    with pytest.warns(UserWarning, match="runs the code in"):
        assert_trained(load(path, factory="tiny_models:Bag", allow_pickle=True).module)


@pytest.mark.filterwarnings("ignore:.*runs the code in", "ignore:.*a moving average")
@pytest.mark.parametrize("name", ["model", "net", "module", "network", "ema"])
def test_module_in_dict_needs_allowed_pickles(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"epoch": 3, name: trained(), "optimizer": None}, path)
    with pytest.raises(CheckpointError, match=r"tiny_models\.Bag.*--allow-pickle"):
        load(path)
    assert_trained(load(path, allow_pickle=True).module)
    assert_trained(load(path, factory="tiny_models:Bag", allow_pickle=True).module)


@pytest.mark.filterwarnings("ignore:.*runs the code in")
def test_dict_without_module_suggests_factory(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"model": trained().state_dict(), "config": Settings()}, path)
    with pytest.raises(CheckpointError, match=r"'model', 'config'\. Add --factory"):
        load(path, allow_pickle=True)
    torch.save({"model": trained(), "net": trained()}, path)
    with pytest.raises(CheckpointError, match="modules under model, net"):
        load(path, allow_pickle=True)


@pytest.mark.filterwarnings("ignore:.*runs the code in")
def test_checkpoint_advice_leads_to_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt"
    torch.save({"model": trained().state_dict(), "config": Settings()}, path)
    words: list[str | Path] = ["inspect", path]
    for option in (["--factory", "tiny_models:Bag"], ["--allow-pickle"]):
        outcome = run_here(words, capsys)
        assert outcome.code == 2
        assert option[0] in outcome.err
        words += option
    assert run_here(words, capsys).code == 0


@pytest.mark.parametrize(
    "place",
    [
        ("network",), ("params",), ("weights",), ("model", "state_dict"), ("state", "model"),
        ("checkpoint", "model_state_dict"), ("state_dict", "model"), ("model", "model"),
    ],
    ids=".".join,
)  # fmt: skip
def test_weights_are_found_in_common_holders(place: tuple[str, ...], tmp_path: Path) -> None:
    """Scripts put the weights under several names and depths."""
    content: Any = trained().state_dict()
    for name in reversed(place):
        content = {name: content, "loss": torch.tensor(1.0), "optimizer": optimizer().state_dict()}
    torch.save(content, tmp_path / "model.pt")
    assert_trained(load(tmp_path / "model.pt", factory="tiny_models:Bag").module)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda s: {"model": s, "ema": {"shadow": s, "decay": 0.9}}, "not those under ema.shadow"),
        (lambda s: {"model": s, "ema": {"shadow_params": list(s.values())}}, "ema.shadow_params"),
        (
            lambda s: {"model": {"state_dict": s, "ema": s}},
            "under model.state_dict, .*under model.ema",
        ),
        (lambda s: {"model": s, "shadow": s}, "not those under shadow"),
        (lambda s: {"state_dict": s, "ema": s, "x": np.float64(1)}, "weights_only=False"),
        (lambda s: {"epoch": 1, "ema": {"shadow": s}}, "a moving average"),
        (lambda s: {"params_ema": s}, "a moving average"),
    ],
)
def test_warning_names_chosen_weights(content: Any, said: str, tmp_path: Path) -> None:
    torch.save(content(trained().state_dict()), tmp_path / "model.pt")
    with pytest.warns(UserWarning, match=said):
        assert_trained(load(tmp_path / "model.pt", factory="tiny_models:Bag").module)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (lambda s: {"generator": s, "discriminator": s, "epoch": 3}, "generator, discriminator"),
        (lambda s: {"netG": s, "netD": s, "optimizer": optimizer().state_dict()}, "netG, netD"),
        (lambda s: {"student": s, "teacher": s}, "student, teacher"),
        (lambda s: {"encoder": s, "decoder": s, "loss": torch.tensor(1.0)}, "encoder, decoder"),
        (lambda s: {"models": {"a": s, "b": s}}, r"models\.a, models\.b"),
        (lambda s: {"state_dict": {"a": s, "b": s}}, r"state_dict\.a, state_dict\.b"),
    ],
)
def test_weights_of_several_models_are_named(content: Any, names: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(content(trained().state_dict()), path)
    with pytest.raises(CheckpointError, match=rf"weights of several models, under {names}\.") as no:
        load(path, factory="tiny_models:Bag")
    command = no.value.remedy.partition("file: ")[2].partition(". If they")[0]
    exec(command.replace("'one.pt'", repr(str(tmp_path / "one.pt"))), {"torch": torch})
    assert_trained(load(tmp_path / "one.pt", factory="tiny_models:Bag").module)


@pytest.mark.filterwarnings("ignore:.*runs the code in")
def test_modules_of_several_names_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"generator": trained(), "discriminator": trained()}, path)
    with pytest.raises(CheckpointError, match="under generator, discriminator") as refused:
        load(path, allow_pickle=True)
    assert "weights_only=False" in refused.value.remedy


def test_weights_of_unusual_name_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"swa_model": trained().state_dict(), "optimizer": optimizer().state_dict()}, path)
    with pytest.raises(CheckpointError, match="under swa_model, which is not a usual name"):
        load(path, factory="tiny_models:Bag")
