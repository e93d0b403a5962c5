"""One tiny model, exported once and served once for the whole session."""

import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import httpx
import input_models
import pytest
import tiny_models
import torch
from commands import Outcome, run_python
from filelock import FileLock
from hypothesis import settings
from ray_cluster import ray_running
from servers import serving

import aftexport
from aftexport.capture.capture import capture
from aftexport.engines.cuda import device
from aftexport.errors import EngineError
from aftexport.nn import DocumentClassifier
from aftexport.pipeline.export import export

pytest_plugins = ["sampling", "budget", "markers", "skips"]

# The same examples on every run, so that a change is judged and not the dice;
# --hypothesis-profile=random looks further.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("random", derandomize=False)
settings.load_profile("fixed")

MakeOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave the objects that exist once the tests are collected out of garbage collection.

    Tens of thousands of tests and the imported modules are over a million objects, which live until
    the end. Every full collection would visit all of them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def make_once(tmp_path_factory: pytest.TempPathFactory) -> MakeOnce:
    """Return a function that fills a folder, by its name, in the first worker that needs it."""
    own = tmp_path_factory.getbasetemp()
    root = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def folder_of(name: str, make: Callable[[Path], object]) -> Path:
        folder, draft = root / "shared" / name, root / "drafts" / name
        with FileLock(root / f"{name}.lock"):
            if not folder.is_dir():
                shutil.rmtree(draft, ignore_errors=True)  # of a worker that failed
                draft.mkdir(parents=True)
                make(draft)
                folder.parent.mkdir(exist_ok=True)
                draft.rename(folder)
        return folder

    return folder_of


@pytest.fixture(scope="session")
def classifier() -> DocumentClassifier:
    return tiny_models.classifier()


@pytest.fixture(scope="session")
def checkpoint_file(classifier: DocumentClassifier, make_once: MakeOnce) -> Path:
    def make(folder: Path) -> None:
        tokenizer = tiny_models.byte_tokenizer().to_str()
        path = folder / "model.pt"
        aftexport.save(path, model=classifier, labels=tiny_models.LABELS, tokenizer=tokenizer)

    return make_once("checkpoint", make) / "model.pt"


@pytest.fixture(scope="session")
def program_file(classifier: DocumentClassifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    torch.export.save(capture(classifier), path)
    return path


@pytest.fixture(scope="session")
def exporting(checkpoint_file: Path, make_once: MakeOnce) -> tuple[Outcome, Path]:
    """What ``aftexport model.pt --to onnx`` said, and the folder it was typed in."""

    def make(folder: Path) -> None:
        work = folder / "exported"
        work.mkdir()
        shutil.copy(checkpoint_file, work / "model.pt")
        outcome = run_python(
            "-m", "aftexport", "model.pt", "--to", "onnx", cwd=work, PYTHONHASHSEED="1"
        )
        (folder / "outcome.json").write_text(json.dumps(asdict(outcome)), "utf-8")

    folder = make_once("exporting", make)
    said = json.loads((folder / "outcome.json").read_text("utf-8"))
    return Outcome(**said), folder / "exported"


@pytest.fixture(scope="session")
def bundle_folder(exporting: tuple[Outcome, Path]) -> Path:
    outcome, folder = exporting
    assert outcome.code == 0, outcome.err
    return folder / "model.bundle"


@pytest.fixture(scope="session")
def feature_bundle(make_once: MakeOnce) -> Path:
    """A bundle of a model of features, which are normalized, with ``model.pt`` beside it."""

    def make(folder: Path) -> None:
        torch.save(input_models.Sensors().state_dict(), folder / "model.pt")
        export(
            folder / "model.pt",
            factory="input_models:Sensors",
            feature_file=input_models.feature_file(folder),
            out=folder / "model.bundle",
            labels=tiny_models.LABELS,
        )

    return make_once("features", make) / "model.bundle"


@pytest.fixture(scope="session")
def extra_bundle(make_once: MakeOnce) -> Path:
    """A bundle of a model with extra inputs of each kind but one, with ``model.pt`` beside it."""

    def make(folder: Path) -> None:
        torch.save(input_models.Events().state_dict(), folder / "model.pt")
        export(
            folder / "model.pt",
            factory="input_models:Events",
            inputs=input_models.INPUTS,
            out=folder / "model.bundle",
            labels=tiny_models.LABELS,
            tokenizer="bytes",
        )

    return make_once("extra", make) / "model.bundle"


@pytest.fixture
def bundle_copy(bundle_folder: Path, tmp_path: Path) -> Path:
    """A bundle to damage."""
    return Path(shutil.copytree(bundle_folder, tmp_path / "copy.bundle"))


@pytest.fixture(scope="session")
def rtx_bundle(checkpoint_file: Path, make_once: MakeOnce) -> Path:
    """A bundle with a portable TensorRT engine."""

    def make(folder: Path) -> None:
        out = folder / "rtx.bundle"
        export(checkpoint_file, to="trt-rtx", precision="fp16", max_length=500, out=out)

    return make_once("rtx", make) / "rtx.bundle"


@pytest.fixture
def no_gpu() -> None:
    """For what is done where no GPU is."""
    with suppress(EngineError):
        pytest.skip(f"a GPU is here: {device()}")


@pytest.fixture
def rtx_copy(rtx_bundle: Path, tmp_path: Path) -> Path:
    """Such a bundle to damage."""
    return Path(shutil.copytree(rtx_bundle, tmp_path / "rtx.bundle"))


@pytest.fixture(scope="session")
def server_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "log"


@pytest.fixture(scope="session")
def server(bundle_folder: Path, server_log: Path) -> Iterator[str]:
    """The address of a real ``aftserve``."""
    with serving(bundle_folder, server_log, "--max-tokens", "6000", measured=True) as (address, _):
        yield address


@pytest.fixture
def client(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, timeout=60) as session:
        yield session


@pytest.fixture(scope="module")
def ray() -> Iterator[dict[str, str]]:
    """The environment in which commands find a local Ray, whose dozen processes are never idle."""
    with ray_running() as variables:
        yield variables
