"""API keys, their file, and the rate of requests that each allows."""

import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import stat
import time
import tomllib
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import Request, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from aftexport.errors import UsageError
from aftserve.errors import BusyError, ForbiddenError, UnauthorizedError
from aftserve.http.access_log import add_log_fields
from aftserve.http.clients import Client, current_client
from aftserve.observability.file_watch import FileWatch

logger = logging.getLogger("aftserve.keys")

_BEARER = HTTPBearer(auto_error=False, description="An API key.")
_HEADER = APIKeyHeader(name="X-API-Key", auto_error=False, description="An API key.")
_BLANKS = ("", " ", "\t", "\n", "\r", "\r\n")
"""Empty keys, as echo and editors end them."""
_BLANK_DIGESTS = {hashlib.sha256(blank.encode()).hexdigest() for blank in _BLANKS}
_PARTS = 1000
_SEVERAL = "Expected one API key, got two different ones."
_REMEDY = "Make one with: aftserve key NAME [RATE]"
_MAX_LINKS = 40
"""Maximum number of links that Linux follows in one path."""


_SECONDS = {
    "second": 1,
    "minute": 60,
    "hour": 3600,
    "day": 86400,
    "month": 30 * 86400,
    "year": 360 * 86400,
}
"""The seconds of each period."""
_RATE = re.compile(
    rf"([0-9]+)\s*(?:/|per)\s*([1-9][0-9]*)?\s*({'|'.join(_SECONDS)})s?", re.IGNORECASE | re.ASCII
)
_SEPARATORS = re.compile("[,;|]")


@dataclass(frozen=True)
class _Rate:
    """An amount within a number of periods."""

    amount: int
    periods: int
    period: str

    def __str__(self) -> str:
        return f"{self.amount} per {self.periods} {self.period}"

    @property
    def seconds(self) -> int:
        return self.periods * _SECONDS[self.period]


def _parse_rates(text: str) -> Iterator[_Rate]:
    """Yield the rates of a text such as ``60/minute;1000/day``; ValueError for other texts."""
    for part in _SEPARATORS.split(text):
        if (found := _RATE.fullmatch(part.strip())) is None:
            raise ValueError(f"expected a rate such as 60/minute, got {part.strip()!r}")
        amount, periods, period = found.groups()
        yield _Rate(int(amount), int(periods or 1), period.lower())


def _check_rate(rate: str) -> str:
    list(_parse_rates(rate))
    return rate


def _check_digest(digest: str) -> str:
    if digest in _BLANK_DIGESTS:
        raise ValueError("the digest of a blank key, which every client could send")
    return digest


Rate = Annotated[str, AfterValidator(_check_rate)]


class Key(BaseModel):
    """One section of the file of keys, named after the owner of the key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$"), AfterValidator(_check_digest)]
    rate: Rate | None = None
    """Maximum rate of requests."""
    tokens: Rate | None = None
    """Maximum rate of tokens of accepted documents."""
    seconds: Rate | None = None
    """Maximum rate of predicted seconds of the engine."""
    admin: bool = False
    """Whether the key may load, reload and unload models."""


_FILE = TypeAdapter(dict[str, Key])


@dataclass
class _Group:
    """Requests that arrived close together."""

    first: float
    last: float = 0.0
    count: int = 0


class _SlidingWindow:
    """The requests that a rate has accepted within the last period."""

    # Requests that arrive close together are one group with the time of the last, so that memory
    # does not grow with their number. So a request counts for up to a thousandth of the period too
    # long.

    def __init__(self, rate: _Rate) -> None:
        self.rate = rate
        self._seconds = float(rate.seconds)
        self._groups = deque[_Group]()
        self._count = 0

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the next request is accepted, from 0 on."""
        while self._groups and self._groups[0].last + self._seconds <= now:
            self._count -= self._groups.popleft().count
        if self._count < self.rate.amount:
            return 0
        oldest = self._groups[0].last if self._groups else now  # a rate may be 0
        return oldest + self._seconds - now

    def accept(self, now: float) -> None:
        """Count a request."""
        if not self._groups or now - self._groups[-1].first > self._seconds / _PARTS:
            self._groups.append(_Group(now))
        self._groups[-1].last = now
        self._groups[-1].count += 1
        self._count += 1


class _Allowance:
    """An amount of work that fills up evenly over its period."""

    # A request that is larger than the whole amount waits until the allowance is full, and
    # overdraws it. So no request is refused for ever, and the rate holds in the long run.

    def __init__(self, rate: _Rate) -> None:
        self.rate = rate
        self._per_second = rate.amount / rate.seconds
        self._left = float(rate.amount)
        self._at = -math.inf

    def seconds_left(self, cost: float, now: float) -> float:
        """Return the seconds until a cost may be spent, from 0 on."""
        filled = self._left + (now - self._at) * self._per_second if self._per_second else 0.0
        self._left, self._at = min(self.rate.amount, filled), now
        lacking = min(cost, self.rate.amount) - self._left
        if self._per_second:
            return max(0.0, lacking / self._per_second)
        return float(self.rate.seconds)  # a rate may be 0

    def spend(self, cost: float) -> None:
        """Spend a cost."""
        self._left -= cost


def _check_waits(waits: Sequence[tuple[float, str]]) -> None:
    """Raise BusyError with the longest wait, if there is any, and its reason."""
    left, problem = max(waits, default=(0.0, ""))
    if left > 0:
        raise BusyError(problem, "Try again later.", left)


class Keys:
    """The API keys of the server, by the names of their owners."""

    # A key has 256 random bits, so its digest needs no salt.

    def __init__(self, keys: Mapping[str, Key]) -> None:
        self._digests = {name: bytes.fromhex(key.sha256) for name, key in keys.items()}
        self._rates = {
            name: [_SlidingWindow(rate) for rate in _parse_rates(key.rate)]
            for name, key in keys.items()
            if key.rate
        }
        self._allowances = {
            name: [
                [_Allowance(rate) for rate in _parse_rates(text)] if text else []
                for text in (key.tokens, key.seconds)
            ]
            for name, key in keys.items()
        }
        self._admins = {name for name, key in keys.items() if key.admin}

    @classmethod
    def read(cls, path: Path) -> "Keys":
        """Read a TOML file of keys; warn if every user of the machine may read or replace it."""
        try:
            keys = _FILE.validate_python(tomllib.loads(path.read_text("utf-8")))
            exposed = list(exposures(path))
        except ValidationError as error:
            first: Any = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise UsageError(f"--api-keys {path}: {place}: {first['msg']}.", _REMEDY) from error
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"--api-keys {path}: {error}.", _REMEDY) from error
        if not keys:
            raise UsageError(f"--api-keys {path}: the file has no keys.", _REMEDY)
        owners = dict[str, str]()
        for name, key in keys.items():
            if (other := owners.setdefault(key.sha256, name)) != name:
                raise UsageError(
                    f"--api-keys {path}: {name}.sha256: the same key as that of {other}.", _REMEDY
                )
        for exposure in exposed:
            logger.warning("--api-keys: %s", exposure)
        return cls(keys)

    @property
    def owners(self) -> Collection[str]:
        """The names of the owners."""
        return self._digests.keys()

    def replace(self, keys: "Keys") -> None:
        """Use other keys from now on; an owner whose rates stay keeps its counted work."""
        rates, allowances = keys._rates.copy(), keys._allowances.copy()
        for name, windows in self._rates.items():
            if [one.rate for one in rates.get(name, ())] == [one.rate for one in windows]:
                rates[name] = windows
        for name in allowances.keys() & self._allowances.keys():
            allowances[name] = [
                old if [one.rate for one in old] == [one.rate for one in new] else new
                for old, new in zip(self._allowances[name], allowances[name], strict=True)
            ]
        self._digests, self._rates, self._admins = keys._digests, rates, keys._admins
        self._allowances = allowances

    def owner(self, *given: str) -> str:
        """Return the one owner of these keys, in a time that does not depend on them."""
        found = set[str]()
        for one in given:
            digest, is_blank = hashlib.sha256(one.encode()).digest(), not one.strip()
            for name, known in self._digests.items():
                if hmac.compare_digest(digest, known) and not is_blank:
                    found.add(name)
        if len(found) > 1:
            raise UnauthorizedError(_SEVERAL)
        if not found:
            raise UnauthorizedError
        return found.pop()

    def count(self, name: str) -> None:
        """Count a request of an owner; BusyError if the owner's rate is exceeded."""
        windows, now = self._rates.get(name, ()), time.monotonic()
        waits = [
            (one.seconds_left(now), f"The rate of this API key is {one.rate}.") for one in windows
        ]
        _check_waits(waits)
        for window in windows:  # a refused request counts for none of them
            window.accept(now)

    def client(self, name: str) -> Client:
        """Return an owner as a client, on all of its connections."""
        return Client(name, partial(self._spend, name))

    def _spend(self, name: str, tokens: int, seconds: float) -> None:
        now = time.monotonic()
        by_tokens, by_seconds = self._allowances.get(name, ([], []))
        spent = [(one, float(tokens), "tokens") for one in by_tokens]
        spent += [(one, seconds, "s") for one in by_seconds]
        _check_waits(
            [
                (
                    one.seconds_left(cost, now),
                    f"The rate of this API key is {one.rate} in {unit}, and the documents have "
                    f"{cost:.6g}.",
                )
                for one, cost, unit in spent
            ]
        )
        for one, cost, _ in spent:  # a refused request spends none of them
            one.spend(cost)

    def check_admin(self, name: str) -> None:
        """Raise ForbiddenError unless the key of an owner is marked admin."""
        if name not in self._admins:
            raise ForbiddenError

    def dependency(self, *, admin: bool = False) -> Callable[..., Awaitable[None]]:
        """Return a check that refuses a request without a key or over the key's rate."""

        async def authorize(
            request: Request,
            _bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
            _header: Annotated[str | None, Security(_HEADER)],  # both are for the OpenAPI document
        ) -> None:
            name = self.owner(*given_keys(request.headers.items()))
            add_log_fields(request, key=name)
            current_client.set(self.client(name))
            self.count(name)
            if admin:
                self.check_admin(name)

        return authorize


class KeyFile:
    """The API keys of a file, in one object whose content changes with the file."""

    def __init__(self, path: Path) -> None:
        # Before the read, or a change between both would be overlooked.
        self.watch = FileWatch(
            [path], partial(Keys.read, path), self._use, name="API keys", logger=logger
        )
        self.keys = Keys.read(path)

    def _use(self, keys: Keys) -> str:
        self.keys.replace(keys)
        return ", ".join(keys.owners)


def given_keys(headers: Iterable[tuple[str, str]]) -> Collection[str]:
    """Return the API keys of a request over HTTP or gRPC, whose headers are in lower case."""
    # Either header may have one: a gateway in front may use the other one for its own key.
    found = dict[str, str]()
    for name, value in headers:
        key = value
        if name == "authorization":
            scheme, key = get_authorization_scheme_param(value)
            if scheme.lower() != "bearer":
                continue
        elif name != "x-api-key":
            continue
        if found.setdefault(name, key) != key:
            raise UnauthorizedError(_SEVERAL)
    return found.values()


def make_key(
    name: str,
    rate: str | None,
    *,
    tokens: str | None = None,
    seconds: str | None = None,
    admin: bool = False,
) -> tuple[str, str]:
    """Return a new key, and the section of the file that admits it at rates as ``60/minute``."""
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise UsageError(
            f"NAME must be letters, digits, - and _, got {name!r}.", "Choose another name."
        )
    rates = {"rate": rate, "tokens": tokens, "seconds": seconds}
    for field, given in rates.items():
        if given is None:
            continue
        try:
            _check_rate(given)
        except ValueError as error:
            option = "RATE" if field == "rate" else f"--{field}"
            raise UsageError(
                f"{option} must be a number per period, got {given!r}.",
                "Write, for example, 60/minute.",
            ) from error
    key = secrets.token_urlsafe(32)
    lines = [f"[{name}]", f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
    lines += [f'{field} = "{given}"' for field, given in rates.items() if given is not None]
    if admin:
        lines.append("admin = true")
    return key, "\n".join(lines)


def exposures(file: Path) -> Iterator[str]:
    """Yield a sentence for each way in which any user may read or replace a file."""
    # All folders that the system passes on the way are checked, through links too.
    if os.name != "posix":
        return  # other systems do not use the permission bits
    mode = file.stat().st_mode
    if mode & stat.S_IWOTH:
        yield f"every user may write {file}, and so add keys: chmod o-w it"
    if mode & stat.S_IROTH:
        yield f"every user may read {file}: chmod o-r it"
    for folder in _folders_to(file):
        mode = folder.stat().st_mode
        # In a sticky folder, such as /tmp, users cannot replace files of others.
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield f"every user may write the folder {folder}, and so replace {file}: chmod o-w it"


def _folders_to(file: Path) -> Iterable[Path]:
    """Return the folders in which a name of the path, or of a link on it, is looked up."""
    folders: dict[Path, None] = {}
    folder, links = Path(file.absolute().anchor), 0
    names = deque(file.absolute().parts[1:])
    while names:
        folders[folder] = None
        name = names.popleft()
        place = folder.parent if name == ".." else folder / name
        if place.is_symlink() and links < _MAX_LINKS:
            links += 1
            target = place.readlink()
            names.extendleft(reversed(target.parts[1:] if target.is_absolute() else target.parts))
            place = Path(target.anchor) if target.is_absolute() else folder
        folder = place
    return folders
