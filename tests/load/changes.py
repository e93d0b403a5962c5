"""Changes of a server under load by its administrator: bundles, models and API keys."""

import asyncio
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from bundle_swaps import damage

from aftserve.api.api_keys import make_key
from load.client import Connection, Response
from load.every_head import Document, Expected


@dataclass
class Generations:
    """The generations of a file of the server, numbered from 0."""

    written: int = 0  # the newest that the server may have read
    seen: int = 0  # the newest that an answer has shown; later requests have at least this one

    def show(self, generation: int) -> None:
        """Note the generation of an answer."""
        self.seen = max(self.seen, generation)

    def since(self, seen: int) -> range:
        """Return the generations that may have answered a request sent when ``seen`` was seen."""
        return range(seen, self.written + 1)


@dataclass
class ServedModel:
    """A model whose bundle is replaced, and the answers of each bundle."""

    name: str
    # Digest and expected answers of the bundles, which take turns.
    variants: Sequence[tuple[str, Sequence[Expected]]]
    prefix: str = ""  # path of the model, without a slash at its end
    is_default: bool = True  # whether it answers paths without a prefix
    generations: Generations = field(default_factory=Generations)
    # The model is loaded in even generations.
    presence: Generations = field(default_factory=Generations)

    def digest(self, generation: int) -> str:
        """Return the digest of the bundle of a generation."""
        return self.variants[generation % len(self.variants)][0]

    def expected(self, generation: int, document: Document) -> Expected:
        """Return the answer of the bundle of a generation for a document."""
        return self.variants[generation % len(self.variants)][1][document.number]


@dataclass
class KeyRing:
    """The API keys of the clients."""

    admin: str  # stays, with the rights to reload
    limited: str  # stays, with a rate
    # Of each generation; only that of the file is valid, and the first never was.
    rotated: list[str]
    generations: Generations = field(default_factory=lambda: Generations(written=1, seen=1))

    def draw(self, generator: np.random.Generator) -> int | None:
        """Draw the generation of a key: current, next or replaced; None for the limited key."""
        seen, written = self.generations.seen, self.generations.written
        share = generator.random()
        if share < 0.1:
            return None
        if share < 0.3:
            return seen - 1
        return written if share < 0.5 else seen

    def key(self, generation: int | None) -> str:
        """Return the key that was drawn."""
        return self.limited if generation is None else self.rotated[generation]


_RATE = "20/second"
_LOOKS = 3000
_LOOK_SECONDS = 0.02


class KeyRotation:
    """The file of API keys, with keys that stay and one that is replaced."""

    def __init__(self, path: Path) -> None:
        admin, self._admin = make_key("admin", None, admin=True)
        limited, self._limited = make_key("limited", _RATE)
        (never, _), (first, section) = make_key("rotated", None), make_key("rotated", None)
        self.ring = KeyRing(admin, limited, [never, first])
        self.faults: list[str] = []
        self._path = path
        self._write(section)

    @property
    def count(self) -> int:
        """Number of replaced keys."""
        return len(self.ring.rotated) - 2

    async def rotate(self, connection: Connection) -> None:
        """Replace the file by one with the next key, and wait until the key is in use."""
        await asyncio.to_thread(self._replace)
        for _ in range(_LOOKS):
            headers = {"Authorization": f"Bearer {self.ring.rotated[-1]}"}
            response = await connection.exchange("GET", "/info", headers=headers)
            if response.status == 200:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        else:
            self.faults.append("a key of the file is never accepted")
        self.ring.generations.show(self.ring.generations.written)

    def _replace(self) -> None:
        key, section = make_key("rotated", None)
        self.ring.rotated.append(key)
        self.ring.generations.written += 1
        self._write(section)

    def _write(self, section: str) -> None:
        following = self._path.with_suffix(".next")
        following.touch(0o600)
        following.write_text("\n".join([self._admin, self._limited, section]), "utf-8")
        following.replace(self._path)


class Administrator:
    """A client with a key that is marked admin."""

    def __init__(self, address: str, process: "subprocess.Popen[bytes]", key: str) -> None:
        self._address = address
        self._process = process
        self._key = key
        self.faults: list[str] = []  # waits without an end

    async def reload(self, prefix: str) -> Response:
        """Reload the bundle of a model."""
        return await self._ask("POST", f"{prefix}/reload")

    async def change(self, name: str, verb: str) -> None:
        """Load or unload a model by the Open Inference Protocol."""
        response = await self._ask("POST", f"/v2/repository/models/{name}/{verb}")
        if response.status != 200:
            self.faults.append(f"{verb} of {name}: {response.status} {response.body!r}")

    async def hang_up(self, staying: Sequence[str] = (), leaving: Sequence[str] = ()) -> None:
        """Send SIGHUP, and wait until it has taken effect."""
        # staying: paths of the models that are reloaded
        # leaving: paths of the models that are unloaded
        before = [await self._last_reload(prefix) for prefix in staying]
        self._process.send_signal(signal.SIGHUP)
        for prefix, last in zip(staying, before, strict=True):
            for _ in range(_LOOKS):
                if await self._last_reload(prefix) != last:
                    break
                await asyncio.sleep(_LOOK_SECONDS)
            else:
                self.faults.append(f"{prefix or 'the model'} is not reloaded after SIGHUP")
        for prefix in leaving:
            await self.wait_for_bundle(prefix, None)

    async def wait_for_bundle(self, prefix: str, digest: str | None) -> None:
        """Wait until a model answers by a bundle; None for no model."""
        for _ in range(_LOOKS):
            if (await self._info(prefix)).get("bundle") == digest:
                return
            await asyncio.sleep(_LOOK_SECONDS)
        self.faults.append(f"{prefix or 'the model'} does not answer by {digest} after SIGHUP")

    async def _last_reload(self, prefix: str) -> Any:
        return (await self._info(prefix)).get("last_reload", "not loaded")

    async def _info(self, prefix: str) -> dict[str, Any]:
        """Return the description of a model, or of the error."""
        response = await self._ask("GET", f"{prefix}/info")
        content: dict[str, Any] = json.loads(response.body)
        return content

    async def _ask(self, method: str, path: str) -> Response:
        connection = Connection(self._address)  # of its own, as requests overlap
        try:
            return await connection.exchange(method, path, headers={"X-API-Key": self._key})
        finally:
            connection.close()


_DAMAGED = 5
"""Each fifth bundle comes after a damaged one, which the server must refuse."""


@dataclass(frozen=True)
class Place:
    """The place of a served bundle, and the bundles that take turns there."""

    model: ServedModel
    folder: Path
    attic: Path  # for the bundles that were there before, and for those to come
    bundles: Sequence[Path]  # they take turns

    def put(self, generation: int, *, damaged: bool = False) -> None:
        """Move a copy of the bundle of a generation to the place, as a deployment does."""
        self.attic.mkdir(exist_ok=True)
        bundle = self.bundles[generation % len(self.bundles)]
        copy = Path(shutil.copytree(bundle, self._name()))
        if damaged:
            damage(copy)
        self.clear()
        copy.rename(self.folder)

    def clear(self) -> None:
        """Move the bundle away, if there is one."""
        if self.folder.exists():
            self.folder.rename(self._name())

    def _name(self) -> Path:
        return self.attic / str(time.monotonic_ns())


class Changes:
    """The changes of a server until they are told to stop."""

    def __init__(
        self,
        address: str,
        administrator: Administrator,
        keys: KeyRotation,
        staying: Place,  # its bundle is replaced and reloaded
        leaving: Place | None = None,  # unloaded and loaded again
    ) -> None:
        self._address = address
        self._administrator = administrator
        self._keys = keys
        self._staying = staying
        self._leaving = leaving
        self._turn = asyncio.Lock()
        self.stopping = False  # no further change may begin
        self.reloads = 0
        self.refused = 0
        self.returns = 0  # of the model that leaves
        self.faults: list[str] = []

    async def run(self, seed: int) -> None:
        """Change everything until ``stopping``."""
        # Changes of bundles take turns, because SIGHUP reads all of them.
        self._turn = asyncio.Lock()
        changing = [self._reload(seed), self._rotate_keys(seed)]
        if self._leaving is not None:
            changing.append(self._leave(self._leaving, seed))
        await asyncio.gather(*changing)

    async def _reload(self, seed: int) -> None:
        """Replace the bundle, and reload it by POST /reload or by SIGHUP in turn.

        The last bundle is another one than the first, so that a server that keeps it is found.
        """
        generator, place = np.random.default_rng(seed), self._staying
        generations, prefix = place.model.generations, place.model.prefix
        while not self.stopping or generations.written % len(place.bundles) == 0:
            await asyncio.sleep(generator.uniform(0.05, 0.5))
            async with self._turn:
                if self.reloads % _DAMAGED == _DAMAGED - 1:
                    await self._refuse(place)
                generations.written += 1
                digest = place.model.digest(generations.written)
                await asyncio.to_thread(place.put, generations.written)
                if generations.written % 2:
                    response = await self._administrator.reload(prefix)
                    if response.status != 200 or json.loads(response.body)["bundle"] != digest:
                        self.faults.append(f"POST /reload: {response.status} {response.body!r}")
                else:
                    await self._hang_up()
                    await self._administrator.wait_for_bundle(prefix, digest)
                generations.show(generations.written)
            self.reloads += 1

    async def _refuse(self, place: Place) -> None:
        """Have a damaged bundle refused."""
        await asyncio.to_thread(place.put, place.model.generations.written, damaged=True)
        response = await self._administrator.reload(place.model.prefix)
        if response.status != 409:
            self.faults.append(f"a damaged bundle: {response.status} {response.body!r}")
        self.refused += 1

    async def _hang_up(self) -> None:
        staying, leaving = [self._staying.model], list[ServedModel]()
        if self._leaving is not None:
            gone = self._leaving.model.presence.written % 2 == 1
            (leaving if gone else staying).append(self._leaving.model)
        await self._administrator.hang_up(
            [model.prefix for model in staying], [model.prefix for model in leaving]
        )

    async def _leave(self, place: Place, seed: int) -> None:
        """Unload a model, and load it with another bundle: by SIGHUP and by requests in turn."""
        generator, model = np.random.default_rng([seed, 1]), place.model
        while not self.stopping:
            by_request = self.returns % 2 == 1
            await asyncio.sleep(generator.uniform(0.1, 0.5))
            if by_request:
                model.presence.written += 1
                await self._administrator.change(model.name, "unload")
            else:
                async with self._turn:
                    model.presence.written += 1
                    await asyncio.to_thread(place.clear)
                    await self._hang_up()
            model.presence.show(model.presence.written)
            await asyncio.sleep(generator.uniform(0.1, 0.5))
            async with self._turn:
                await self._return(place, by_request=by_request)
            self.returns += 1

    async def _return(self, place: Place, *, by_request: bool) -> None:
        model = place.model
        model.generations.written += 1
        model.presence.written += 1
        await asyncio.to_thread(place.put, model.generations.written)
        if by_request:
            await self._administrator.change(model.name, "load")
        else:
            await self._administrator.hang_up([self._staying.model.prefix])
        digest = model.digest(model.generations.written)
        await self._administrator.wait_for_bundle(model.prefix, digest)
        model.generations.show(model.generations.written)
        model.presence.show(model.presence.written)

    async def _rotate_keys(self, seed: int) -> None:
        """Replace the file of API keys, each time once the newest key is in use."""
        generator, connection = np.random.default_rng([seed, 2]), Connection(self._address)
        while not self.stopping:
            await asyncio.sleep(generator.uniform(0.1, 1))
            await self._keys.rotate(connection)
        connection.close()
