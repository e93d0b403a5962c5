"""API keys: who may ask, and how often."""

import hashlib
import hmac
import logging
import secrets
import time
import tomllib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import limits
from fastapi import Request, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from aftexport.errors import UsageError
from aftserve.api.file_permissions import exposures
from aftserve.errors import BusyError, ForbiddenError, UnauthorizedError
from aftserve.http.access_log import note

logger = logging.getLogger("aftserve.keys")

_BEARER = HTTPBearer(auto_error=False, description="An API key.")
_HEADER = APIKeyHeader(name="X-API-Key", auto_error=False, description="The same.")


def _check_rate(rate: str) -> str:
    limits.parse_many(rate)
    return rate


class Key(BaseModel):
    """What the file of keys says of one: the section's name is that of who has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    rate: Annotated[str, AfterValidator(_check_rate)] | None = None
    admin: bool = False


_FILE = TypeAdapter(dict[str, Key])
_PARTS = 1000


@dataclass
class _Together:
    """Requests that came together."""

    first: float
    last: float = 0.0
    count: int = 0


class _Stretch:
    """What a rate has let in of late: in no stretch of its time more than its number.

    Requests that come together are kept as one, by the time of the last, so that memory does not
    grow with the number. They count for a thousandth of that time too long at most. The library
    keeps each, or lets in more, and goes by the system's clock, which may be set.

    Args:
        rate: how many requests in how many seconds.
    """

    def __init__(self, rate: limits.RateLimitItem) -> None:
        self.rate = rate
        self._seconds = float(rate.get_expiry())
        self._together = deque[_Together]()
        self._count = 0

    def seconds_left(self, now: float) -> float:
        """Until it lets in one more; 0 where it does."""
        while self._together and self._together[0].last + self._seconds <= now:
            self._count -= self._together.popleft().count
        if self._count < self.rate.amount:
            return 0
        oldest = self._together[0].last if self._together else now  # a rate may be 0
        return oldest + self._seconds - now

    def let_in(self, now: float) -> None:
        """Counts one."""
        if not self._together or now - self._together[-1].first > self._seconds / _PARTS:
            self._together.append(_Together(now))
        self._together[-1].last = now
        self._together[-1].count += 1
        self._count += 1


class Keys:
    """The keys that are known.

    A key is 256 random bits, so that its bare digest gives nothing away.

    Args:
        keys: by the name of who has it.
    """

    def __init__(self, keys: Mapping[str, Key]) -> None:
        self._digests = {name: bytes.fromhex(key.sha256) for name, key in keys.items()}
        self._rates = {
            name: [_Stretch(rate) for rate in limits.parse_many(key.rate)]
            for name, key in keys.items()
            if key.rate
        }
        self._admins = {name for name, key in keys.items() if key.admin}

    @classmethod
    def read(cls, path: Path) -> "Keys":
        """Reads a TOML file of them; warns where every user of the machine may read or replace it.

        Raises:
            UsageError: where it is none, or holds none.
        """
        try:
            keys = _FILE.validate_python(tomllib.loads(path.read_text("utf-8")))
            exposed = list(exposures(path))
        except ValidationError as error:
            first: Any = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise UsageError(f"--api-keys {path}: {place}: {first['msg']}.", _REMEDY) from error
        except (OSError, ValueError) as error:
            raise UsageError(f"--api-keys {path}: {error}.", _REMEDY) from error
        if not keys:
            raise UsageError(f"--api-keys {path}: it holds no keys.", _REMEDY)
        for exposure in exposed:
            logger.warning("--api-keys: %s", exposure)
        return cls(keys)

    def owner(self, *given: str) -> str:
        """Who has one of these keys; in the same time whatever they are.

        Raises:
            UnauthorizedError: where nobody does.
        """
        found = None
        for digest in [hashlib.sha256(one.encode()).digest() for one in given]:
            for name, known in self._digests.items():
                if hmac.compare_digest(digest, known):
                    found = name
        if found is None:
            raise UnauthorizedError
        return found

    def count(self, name: str) -> None:
        """Counts a request of somebody.

        Raises:
            BusyError: where there were too many.
        """
        rates, now = self._rates.get(name, ()), time.monotonic()
        for stretch in rates:
            if (left := stretch.seconds_left(now)) > 0:
                raise BusyError(f"This API key may ask {stretch.rate}.", "Ask again later.", left)
        for stretch in rates:  # once none of them refuses it
            stretch.let_in(now)

    def dependency(self, *, admin: bool = False) -> Callable[..., Awaitable[None]]:
        """What refuses a request, before its body is read, without a key or over its rate.

        Args:
            admin: and with a key that is not marked so.
        """

        async def authorize(
            request: Request,
            bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
            header: Annotated[str | None, Security(_HEADER)],
        ) -> None:
            # Either will do: a gateway in front may want the other for a key of its own.
            name = self.owner(header or "", bearer.credentials if bearer else "")
            note(request, key=name)
            self.count(name)
            if admin and name not in self._admins:
                raise ForbiddenError

        return authorize


_REMEDY = "Make one with: aftserve key NAME [RATE]"


def make_key(name: str, rate: str | None, *, admin: bool = False) -> tuple[str, str]:
    """A fresh key, and the section of the file that lets it in.

    Args:
        name: of who is to have it.
        rate: how often it may ask, such as ``60/minute``; None for any number of times.
        admin: whether it may have the server reload its bundle.

    Raises:
        UsageError: where the rate is none, or the name does not suit the file.
    """
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise UsageError(f"{name!r} is no name.", "Use letters, digits, - and _.")
    if rate is not None:
        try:
            _check_rate(rate)
        except ValueError as error:
            raise UsageError(f"{rate!r} is no rate.", "Write, for example, 60/minute.") from error
    key = secrets.token_urlsafe(32)
    lines = [f"[{name}]", f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
    if rate is not None:
        lines.append(f'rate = "{rate}"')
    if admin:
        lines.append("admin = true")
    return key, "\n".join(lines)
