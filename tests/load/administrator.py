"""An administrator of a server under load: loads, reloads and unloads, and their results."""

import asyncio
import json
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from load.client import Connection, Response

_LOOKS = 3000
_LOOK_SECONDS = 0.02


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
        # verb: load or unload
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
