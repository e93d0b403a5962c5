"""A second bundle, a folder in which it can replace the first, and a server of both."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import served_heads
import tiny_models
import torch
from bundle_swaps import RepositoryServer, deploy, serving_models
from servers import Serve, serving

import aftexport
from aftexport.pipeline.export import export

SUPPORT = str(Path(served_heads.__file__).parent)
"""The folder of factories, for the process of a reference."""

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
def pair_bundle(make_once: MakeOnce) -> Path:
    """A bundle of a CrossEncoder with one label, whose tokenizer makes types of tokens."""

    def make(folder: Path) -> None:
        import text_pairs  # needs transformers, which the lowest versions lack

        text_pairs.save(folder / "model")
        export(folder / "model", out=folder / "pairs.bundle")

    return make_once("pairs", make) / "pairs.bundle"


@contextmanager
def without_traceback(bundle: Path, log: Path, *options: str, **settings: Any) -> Iterator[str]:
    """Yield the address of a server, which must not log a traceback."""
    with serving(bundle, log, *options, **settings) as (address, _):
        yield address
    assert "Traceback" not in log.read_text("utf-8")


@pytest.fixture(scope="session")
def heads_server(heads_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that runs each document alone, so that answers have equal bits."""
    log = tmp_path_factory.mktemp("heads") / "log"
    options = ("--max-documents", "4", "--budget-tokens", "1", "--max-tokens", "2000")
    with without_traceback(heads_bundle, log, *options) as address:
        yield address


@pytest.fixture
def heads_client(heads_server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=heads_server, timeout=60) as session:
        yield session


def reference(bundle: Path, factory: str) -> list[str]:
    """Return the options for the reference of a bundle, whose factory is a module of the tests."""
    return ["--reference", str(bundle.with_name("model.pt")), "--reference-factory", factory]


@pytest.fixture(scope="session")
def extra_server(extra_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of a model with extra inputs, with its reference."""
    log = tmp_path_factory.mktemp("extra") / "log"
    options = reference(extra_bundle, "input_models:Events")
    options += ["--memory-budget-mib", "2", "--max-tokens", "65536"]
    with without_traceback(extra_bundle, log, *options, PYTHONPATH=SUPPORT) as address:
        yield address


@pytest.fixture(scope="session")
def feature_server(feature_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of a model of features, with its reference."""
    folder = tmp_path_factory.mktemp("features")
    log, options = folder / "log", reference(feature_bundle, "input_models:Sensors")
    options += ["--memory-budget-mib", "1", "--max-array-mib", "8", "--spill", str(folder)]
    options += ["--max-tokens", "450000"]
    with without_traceback(feature_bundle, log, *options, PYTHONPATH=SUPPORT) as address:
        yield address


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


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A function that starts a server for the tests of a module, and returns its address."""
    with ExitStack() as stack:

        def start(bundle: Path, *options: str, **settings: Any) -> str:
            log = tmp_path_factory.mktemp("served") / "log"
            return stack.enter_context(without_traceback(bundle, log, *options, **settings))

        yield start


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
