"""Changes of a server under load: bundles are replaced, models come and go, keys are rotated."""

import asyncio
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bundle_swaps import damage

from load.administrator import Administrator
from load.client import Connection
from load.generations import ServedModel
from load.key_rotation import KeyRotation

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
