"""A second bundle, a folder in which it can replace the first, and a server of both."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import served_heads
import tiny_models
import torch
from bundle_swaps import RepositoryServer, deploy, serving_models

import aftexport
from aftexport.pipeline.export import export

MakeOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session", autouse=True)
def engines_end() -> Iterator[None]:
    """Wait for engines of this process, because its exit would abort under a run."""
    yield
    for thread in threading.enumerate():
        if thread.name == "engine":
            thread.join(60)


@pytest.fixture(scope="session")
def heads_bundle(make_once: MakeOnce) -> Path:
    """A bundle of a model with a head of every kind; its source is ``model.pt`` beside it."""
    folder = make_once("heads", served_heads.exported)
    return folder / "heads.bundle"


@pytest.fixture(scope="session")
def other_checkpoint(make_once: MakeOnce) -> Path:
    """A model of the same kind that gives other scores, and its bundle beside it."""

    def make(folder: Path) -> None:
        model = tiny_models.classifier()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(-0.9)
        aftexport.save(
            folder / "model.pt",
            model=model,
            labels=tiny_models.LABELS,
            tokenizer=tiny_models.byte_tokenizer().to_str(),
        )
        export(folder / "model.pt", to="onnx", out=folder / "other.bundle")

    return make_once("other", make) / "model.pt"


@pytest.fixture(scope="session")
def other_bundle(other_checkpoint: Path) -> Path:
    """The bundle of the other model; tests must copy it before they change it."""
    return other_checkpoint.with_name("other.bundle")


@pytest.fixture
def served_folder(bundle_folder: Path, tmp_path: Path) -> Path:
    """Return the folder that the server reads, with a copy of the first bundle."""
    return deploy(bundle_folder, tmp_path / "served.bundle")


@pytest.fixture(scope="module")
def repository(
    bundle_folder: Path, other_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RepositoryServer]:
    """Yield a server of both bundles, which must not log a traceback."""
    folder = tmp_path_factory.mktemp("repository")
    with serving_models(bundle_folder, other_bundle, folder) as server:
        yield server
        assert "Traceback" not in (folder / "log").read_text("utf-8")
