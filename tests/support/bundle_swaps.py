"""Bundles that replace each other under a server, servers of several, and their answers."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from clients import http
from grpc_servers import GrpcServer, serving_grpc
from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftserve.api.api_keys import make_key
from aftserve.model.documents import DocumentAnswer
from aftserve.server import load
from aftserve.serving.repository import ModelRepository
from aftserve.serving.service import Service
from aftserve.settings import Settings

LENGTHS = (1, 16, 300, 20, 2000, 16, 40, 700)


def deploy(bundle: Path, place: Path) -> Path:
    """Move a copy of a bundle into place, as a deployment does."""
    copy = Path(shutil.copytree(bundle, place.with_suffix(".new")))
    if place.exists():
        place.rename(place.with_suffix(f".{time.monotonic_ns()}"))
    return copy.rename(place)


def damage(bundle: Path) -> None:
    """Overwrite some bytes of the bundle's model."""
    with (bundle / "model.onnx").open("r+b") as file:
        file.seek(100)
        file.write(b"\0\0\0\0")


def digest(bundle: Path) -> str:
    return Bundle.open(bundle).digest


def documents() -> list[list[int]]:
    """Return one document for each of ``LENGTHS``."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, 250, length).tolist() for length in LENGTHS]


def load_models(place: Path, *options: str) -> ModelRepository:
    """Load bundles in this process."""
    return load(Settings.read([str(place), "--threads", "1", *options]), Console(quiet=True))


@asynccontextmanager
async def running_models(place: Path, *options: str) -> AsyncIterator[ModelRepository]:
    """Load bundles, and answer requests within the block."""
    models = load_models(place, *options)
    async with models.running():
        yield models


@asynccontextmanager
async def running_service(
    bundle: Path, *options: str, measured: bool = False
) -> AsyncIterator[Service]:
    """Load a bundle, and answer requests within the block, if wanted with measured costs."""
    models = load_models(bundle, *options)
    (service,) = models.loaded()
    if measured:
        service.model.measurement.measure_all()
    async with models.running():
        yield service


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, for half a minute at most."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never happened")


async def accept(service: Service) -> "asyncio.Task[list[DocumentAnswer]]":
    """Send the ``documents``, and return their answers once they wait."""
    asking = asyncio.create_task(service.classify(documents(), time.monotonic() + 60))
    await until(lambda: service.scheduler.waiting_documents >= len(LENGTHS))
    return asking


def expected_scores(bundle: Path) -> dict[tuple[int, ...], list[float]]:
    """Return the scores of each document, each from a run of its own."""
    (service,) = load_models(bundle).loaded()
    classifier = service.model.classifier
    return {
        tuple(ids): list(classifier.classify([np.array(ids)])[0].heads["logits"].scores.values())
        for ids in documents()
    }


def post(address: str, *input_ids: list[int]) -> httpx.Response:
    return http.post(f"{address}/infer", json={"input_ids": list(input_ids)}, timeout=60)


def last_reload(address: str) -> dict[str, object] | None:
    return http.get(f"{address}/info").json()["last_reload"]  # type: ignore[no-any-return]


def served_digest(address: str) -> str:
    return str(http.get(f"{address}/info").json()["bundle"])


TEXTS = ["An invoice.", "Zwei Verträge: 契約 ✉", "long " * 300]


@dataclass(frozen=True)
class RepositoryServer:
    """A server of the models ``a`` and ``b``, with a key of an administrator and one of a user."""

    server: GrpcServer
    folder: Path
    admin_key: str
    user_key: str

    @property
    def admin(self) -> dict[str, str]:
        """The header of an administrator; Triton's client adds others to the mapping."""
        return {"x-api-key": self.admin_key}

    @property
    def user(self) -> dict[str, str]:
        """The header of a client without this right."""
        return {"x-api-key": self.user_key}


@contextmanager
def serving_models(first: Path, second: Path, folder: Path) -> Iterator[RepositoryServer]:
    """Yield a server of copies of two bundles, which are the models ``a`` and ``b``."""
    (admin, one), (user, two) = make_key("admin", None, admin=True), make_key("user", None)
    (folder / "keys").write_text(f"{one}\n{two}\n")
    a, b = deploy(first, folder / "a.bundle"), deploy(second, folder / "b.bundle")
    options = ("--api-keys", str(folder / "keys"), "--threads", "1")
    with serving_grpc(a, folder / "log", str(b), *options) as server:
        yield RepositoryServer(server, folder, admin, user)


def text_input(triton: Any) -> Any:
    """Return the input of a client of Triton: a module for HTTP or gRPC."""
    tensor = triton.InferInput("text", [len(TEXTS)], "BYTES")
    tensor.set_data_from_numpy(np.array(TEXTS, dtype=object))
    return tensor


async def states(models: ModelRepository) -> dict[str, str]:
    return {one.name: one.state for one in await models.index()}


async def reason(models: ModelRepository, name: str) -> str:
    """Return the reason why a model is not ready."""
    (state,) = [one for one in await models.index() if one.name == name]
    assert state.state == "UNAVAILABLE"
    return state.reason


def names(models: ModelRepository) -> list[str]:
    return [service.name for service in models.loaded()]
