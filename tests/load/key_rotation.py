"""A file of API keys of which one is replaced by and by."""

import asyncio
from pathlib import Path

from aftserve.api.api_keys import make_key
from load.client import Connection
from load.generations import KeyRing

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
