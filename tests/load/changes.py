"""Changes of a server under load: its bundle is replaced and reloaded, its API keys are rotated."""

import asyncio
import json
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from bundle_swaps import damage, deploy

from aftserve.api.api_keys import make_key
from load.client import Connection, Response
from load.storm_clients import KeyRing, ServedModel

_RATE = "20/second"
_LOOKS = 3000
_LOOK_SECONDS = 0.02
_DAMAGED = 5
"""Each fifth bundle comes after a damaged one, which the server must refuse."""


class KeyFile:
    """The file of API keys.

    Args:
        path: its path.
    """

    def __init__(self, path: Path) -> None:
        admin, self._admin = make_key("admin", None, admin=True)
        limited, self._limited = make_key("limited", _RATE)
        (never, _), (first, section) = make_key("rotated", None), make_key("rotated", None)
        self.ring = KeyRing(admin, limited, [never, first])
        self._path = path
        self._write(section)

    @property
    def rotations(self) -> int:
        """Number of replaced keys."""
        return len(self.ring.rotated) - 2

    def rotate(self) -> None:
        """Replace the file by one with the next key."""
        key, section = make_key("rotated", None)
        self.ring.rotated.append(key)
        self.ring.generations.written += 1
        self._write(section)

    def _write(self, section: str) -> None:
        following = self._path.with_suffix(".next")
        following.touch(0o600)
        following.write_text("\n".join([self._admin, self._limited, section]), "utf-8")
        following.replace(self._path)


class Changes:
    """The changes of a server until they are told to stop.

    Args:
        address: URL of the server.
        process: its process.
        place: folder of its bundle.
        bundles: bundles that take turns at the place.
        model: the served model.
        key_file: file of the API keys.

    Attributes:
        stopping: whether no further change may begin.
        reloads: number of accepted reloads.
        refused: number of refused reloads.
        faults: description of each reload against the contract.
    """

    def __init__(
        self,
        address: str,
        process: "subprocess.Popen[bytes]",
        place: Path,
        bundles: Sequence[Path],
        model: ServedModel,
        key_file: KeyFile,
    ) -> None:
        self._address = address
        self._process = process
        self._place = place
        self._bundles = bundles
        self._model = model
        self._key_file = key_file
        self.stopping = False
        self.reloads = 0
        self.refused = 0
        self.faults: list[str] = []

    async def reload(self, seed: int) -> None:
        """Replace the bundle, and reload it by POST /reload or by SIGHUP in turn.

        The last bundle is another one than the first, so that a server that keeps it is found.
        """
        generator, connection = np.random.default_rng(seed), Connection(self._address)
        while not self.stopping or self._model.generations.written % len(self._bundles) == 0:
            await asyncio.sleep(generator.uniform(0.05, 0.5))
            if self.reloads % _DAMAGED == _DAMAGED - 1:
                await self._refuse(connection)
            following = self._model.generations.written + 1
            self._model.generations.written = following
            await asyncio.to_thread(deploy, self._bundle(following), self._place)
            digest = self._model.digest(following)
            if following % 2:
                response = await self._admin(connection, "POST", "/reload")
                if response.status != 200 or json.loads(response.body)["bundle"] != digest:
                    self.faults.append(f"POST /reload: {response.status} {response.body!r}")
            else:
                self._process.send_signal(signal.SIGHUP)
                await self._wait_for_bundle(connection, digest)
            self._model.generations.show(following)
            self.reloads += 1
        connection.close()

    async def rotate_keys(self, seed: int) -> None:
        """Replace the file of API keys, each time once the newest key is seen in use."""
        generator, connection = np.random.default_rng(seed), Connection(self._address)
        ring = self._key_file.ring
        while not self.stopping:
            await asyncio.sleep(generator.uniform(0.1, 1))
            await asyncio.to_thread(self._key_file.rotate)
            for _ in range(_LOOKS):
                headers = {"Authorization": f"Bearer {ring.rotated[-1]}"}
                response = await connection.exchange("GET", "/info", headers=headers)
                if response.status == 200:
                    break
                await asyncio.sleep(_LOOK_SECONDS)
            else:
                self.faults.append("a key of the file is never accepted")
            ring.generations.show(ring.generations.written)
        connection.close()

    def _bundle(self, generation: int) -> Path:
        return self._bundles[generation % len(self._bundles)]

    async def _refuse(self, connection: Connection) -> None:
        """Have a damaged bundle refused."""

        def deploy_damaged() -> None:
            deploy(self._bundle(self._model.generations.written), self._place)
            damage(self._place)

        await asyncio.to_thread(deploy_damaged)
        response = await self._admin(connection, "POST", "/reload")
        if response.status != 409:
            self.faults.append(f"a damaged bundle: {response.status} {response.body!r}")
        self.refused += 1

    async def _wait_for_bundle(self, connection: Connection, digest: str) -> None:
        for _ in range(_LOOKS):
            response = await self._admin(connection, "GET", "/info")
            if json.loads(response.body)["bundle"] == digest:
                return
            await asyncio.sleep(_LOOK_SECONDS)
        self.faults.append("a bundle is not in use after SIGHUP")

    async def _admin(self, connection: Connection, method: str, path: str) -> Response:
        headers: Mapping[str, str] = {"X-API-Key": self._key_file.ring.admin}
        return await connection.exchange(method, path, headers=headers)
