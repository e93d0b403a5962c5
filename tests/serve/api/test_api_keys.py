"""API keys and their rates."""

import hashlib
import hmac
import itertools
import json
import re
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from clients import eventually, head, http, raw_connection, response
from clocks import replace_time
from commands import run_python
from hypothesis import given
from hypothesis import strategies as st
from servers import serving

from aftexport.errors import UsageError
from aftserve.api import api_keys
from aftserve.api.api_keys import Key, Keys, make_key
from aftserve.errors import BusyError, UnauthorizedError

OPEN = [
    "/", "/page/page.css", "/page/page.js", "/page/elements.js", "/page/heads.js",
    "/page/tokens.js", "/openapi.json",
    "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/v2",
]  # fmt: skip
CLOSED = ["/parity", "/info", "/metrics", "/v2/models/model", "/v2/models/model/ready"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Return the keys file, a key without a rate, and a key of three requests an hour."""
    always, first = make_key("always", None)
    rarely, second = make_key("rarely", "3/hour")
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(f"{first}\n\n{second}\n")
    file.chmod(0o644)
    return file, always, rarely


@pytest.fixture(scope="module")
def address(
    bundle_folder: Path, made: tuple[Path, str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    log = tmp_path_factory.mktemp("guarded") / "log"
    with serving(bundle_folder, log, "--api-keys", str(made[0]), "--log-format", "json") as (a, _):
        yield a
        infer(a, **{"X-API-Key": made[1]})
    text = log.read_text("utf-8")
    first = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    assert (first["level"], first["logger"]) == ("warning", "aftserve.keys")
    assert "every user may read" in first["message"]
    assert '"key": "always"' in text
    assert made[1] not in text
    assert made[2] not in text


def infer(address: str, **headers: str) -> httpx.Response:
    return http.post(f"{address}/infer", json={"text": "a"}, headers=headers)


@pytest.mark.parametrize("path", OPEN)
def test_health_and_page_need_no_key(address: str, path: str) -> None:
    assert http.get(address + path).status_code == 200


@pytest.mark.parametrize("path", CLOSED)
def test_other_paths_need_key(address: str, path: str, made: tuple[Path, str, str]) -> None:
    assert http.get(address + path).status_code == 401
    allowed = {"X-API-Key": made[1]}
    assert http.get(address + path, headers=allowed).status_code == 200
    gateway = {"Authorization": "Bearer of-a-gateway"}
    assert http.get(address + path, headers=allowed | gateway).status_code == 200
    swapped = {"Authorization": f"Bearer {made[1]}", "X-API-Key": "of-a-gateway"}
    assert http.get(address + path, headers=swapped).status_code == 200


def test_either_header_carries_key(address: str, made: tuple[Path, str, str]) -> None:
    assert infer(address, Authorization=f"Bearer {made[1]}").status_code == 200
    assert infer(address, **{"X-API-Key": made[1]}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic YTpi"},
        {"X-API-Key": ""},
        {"X-API-Key": "ключ".encode().decode("latin-1")},
    ],
)
def test_wrong_key_is_refused(address: str, headers: dict[str, str]) -> None:
    answer = infer(address, **{name: value.encode("latin-1") for name, value in headers.items()})  # type: ignore[arg-type]
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert "Authorization: Bearer KEY" in answer.json()["detail"]


def test_two_different_keys_are_refused(address: str, made: tuple[Path, str, str]) -> None:
    _, key, other = made
    for name, start in (("X-API-Key", ""), ("Authorization", "Bearer ")):
        keys = [(name, start + key), (name, start + key)]
        assert http.get(f"{address}/info", headers=keys).status_code == 200
        for second in (other, "unknown"):
            for several in ([*keys, (name, start + second)], [(name, start + second), *keys]):
                refused = http.get(f"{address}/info", headers=several)
                assert refused.status_code == 401
                assert "got two different ones" in refused.json()["detail"]
    both = {"X-API-Key": key, "Authorization": f"Bearer {other}"}
    assert http.get(f"{address}/info", headers=both).status_code == 401


def test_missing_key_refused_before_body(address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(head(1 << 20))
        status, _ = response(connection)
    assert status == 401


def test_rate_limits_only_its_key(address: str, made: tuple[Path, str, str]) -> None:
    codes = [infer(address, **{"X-API-Key": made[2]}).status_code for _ in range(5)]
    assert codes == [200, 200, 200, 429, 429]
    refused = infer(address, **{"X-API-Key": made[2]})
    assert 3500 < int(refused.headers["Retry-After"]) <= 3600
    assert "3 per 1 hour" in refused.json()["detail"]
    assert infer(address, **{"X-API-Key": made[1]}).status_code == 200


def test_every_key_takes_equal_comparisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right and wrong keys take the same number of constant-time comparisons."""
    made = [make_key(f"key{number}", None) for number in range(5)]
    (tmp_path / "keys.toml").write_text("\n".join(section for _, section in made))
    keys = Keys.read(tmp_path / "keys.toml")
    sizes: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        sizes.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    # compare_digest is constant in time, so only the number of calls could reveal a key.
    monkeypatch.setattr("aftserve.api.api_keys.hmac", SimpleNamespace(compare_digest=compare))
    nearly = made[2][0][:-1] + ("A" if made[2][0][-1] != "A" else "B")
    for one in [key for key, _ in made] + [nearly, "", "x", "x" * 8000, "\xff"]:
        sizes.clear()
        with suppress(UnauthorizedError):
            assert keys.owner(one).startswith("key")
            assert one in dict(made)
        assert sizes == [(32, 32)] * 5


@pytest.mark.parametrize("blank", ["", " ", "\t\n", "\u2003"])
def test_blank_key_admits_nobody(blank: str) -> None:
    """Not even if its digest is among the keys."""
    digest = hashlib.sha256(blank.encode()).hexdigest()
    keys = Keys({"all": Key.model_construct(sha256=digest, admin=True)})
    for sent in ([blank], [blank, ""], [""]):
        with pytest.raises(UnauthorizedError):
            keys.owner(*sent)


def make_admission(file: Path, rate: str) -> Callable[[], bool]:
    """Return a function that counts a request of a key, and tells whether the rate admits it."""
    _, section = make_key("hasty", rate)
    file.write_text(section)
    keys = Keys.read(file)

    def admits() -> bool:
        try:
            keys.count("hasty")
        except BusyError:
            return False
        return True

    return admits


@pytest.mark.parametrize("step", [-1e9, -3600, -0.5, 3600, 1e9])
def test_system_clock_change_keeps_rate(
    step: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, steady = [time.time()], [time.monotonic()]
    replace_time(monkeypatch, api_keys, time=lambda: system[0], monotonic=lambda: steady[0])
    admits = make_admission(tmp_path / "keys.toml", "2/minute")
    assert [admits(), admits(), admits()] == [True, True, False]
    system[0] += step
    assert not admits()
    steady[0] += 60
    assert [admits(), admits(), admits()] == [True, True, False]


@given(
    pauses=st.lists(st.integers(0, 9), max_size=60),
    amount=st.integers(0, 5),
    seconds=st.integers(1, 9),
)
def test_any_window_admits_exact_number(pauses: list[int], amount: int, seconds: int) -> None:
    """Every window of the rate's length admits its number of requests, neither more nor fewer."""
    key = Key(sha256=DIGEST, rate=f"{amount} per {seconds} seconds")
    keys, now, admitted = Keys({"hasty": key}), 0, list[int]()
    with pytest.MonkeyPatch.context() as patch:
        replace_time(patch, api_keys, monotonic=lambda: now)
        for pause in pauses:
            now += pause
            within = [then for then in admitted if now - then < seconds]
            if len(within) < amount:
                keys.count("hasty")
                admitted.append(now)
                continue
            with pytest.raises(BusyError) as refusal:
                keys.count("hasty")
            later = within[0] + seconds - now if within else seconds
            assert refusal.value.retry_after == later


@given(pauses=st.lists(st.sampled_from([0, 1, 2, 300, 998]), max_size=60), amount=st.integers(1, 5))
def test_grouped_requests_expire_slightly_late(pauses: list[int], amount: int) -> None:
    """Requests in quick succession count for at most a thousandth of the window too long."""
    keys = Keys({"hasty": Key(sha256=DIGEST, rate=f"{amount} per 1000 seconds")})
    now, admitted = 0, list[int]()
    with pytest.MonkeyPatch.context() as patch:
        replace_time(patch, api_keys, monotonic=lambda: now)
        for pause in pauses:
            now += pause
            try:
                keys.count("hasty")
            except BusyError:
                assert sum(now - then < 1001 for then in admitted) >= amount
            else:
                assert sum(now - then < 1000 for then in admitted) < amount
                admitted.append(now)


def test_huge_rate_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    replace_time(monkeypatch, api_keys, monotonic=lambda: next(clock))
    keys = Keys({"hasty": Key(sha256=DIGEST, rate=f"{1 << 64}/day")})
    tracemalloc.start()
    try:
        for _ in range(50_000):
            keys.count("hasty")
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()


def test_refused_request_counts_toward_no_rate(tmp_path: Path) -> None:
    admits = make_admission(tmp_path / "keys.toml", "3/hour;1/second")
    for _ in range(3):
        eventually(admits, "the second is over")
    assert not admits()


@pytest.mark.parametrize(("field", "name"), [("tokens", "tokens"), ("seconds", "s")])
def test_allowance_fills_up_evenly(field: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    replace_time(monkeypatch, api_keys, monotonic=lambda: now[0])
    rates = {field: "60/minute"}
    keys = Keys({one: Key.model_validate({"sha256": DIGEST, **rates}) for one in ("a", "b")})

    def left(cost: int, owner: str = "a") -> int:
        """Spend a cost, and return the seconds until a retry, 0 if it is admitted."""
        try:
            keys.client(owner).spend(*((cost, 0.0) if field == "tokens" else (0, float(cost))))
        except BusyError as error:
            return (f"in {name}" in error.problem) * (error.retry_after or 0)
        return 0

    assert [left(40), left(40), left(20), left(1)] == [0, 20, 0, 1]
    assert left(60, "b") == 0
    now[0] += 20
    assert [left(21), left(20)] == [1, 0]
    # More than the whole amount waits for a full allowance, and overdraws it.
    assert left(600) == 60
    now[0] += 60
    assert [left(600), left(1)] == [0, 541]
    keys.replace(Keys({"a": Key.model_validate({"sha256": DIGEST, **rates})}))
    assert left(1) == 541  # an owner whose rates stay keeps what it spent
    assert left(60, "b") == 0  # accepted before the owner was removed
    keys.replace(Keys({"a": Key.model_validate({"sha256": DIGEST, field: "0/minute"})}))
    assert left(1) == 60


def test_longest_wait_of_rates_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_time(monkeypatch, api_keys, monotonic=lambda: 5.0)
    both = "1/second;1/hour"
    keys = Keys({"a": Key(sha256=DIGEST, rate=both, tokens=both, seconds=both)})
    keys.count("a")
    keys.client("a").spend(1, 1.0)
    for call in (lambda: keys.count("a"), lambda: keys.client("a").spend(1, 0.0)):
        with pytest.raises(BusyError, match="1 per 1 hour") as refusal:
            call()
        assert refusal.value.retry_after == 3600


def test_key_command_makes_accepted_key(tmp_path: Path) -> None:
    words = ("alice", "60/minute", "--tokens", "2000/minute", "--seconds", "9/hour")
    outcome = run_python("-m", "aftserve", "key", *words, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    key, section = re.findall(r"\n\n(\S+)\n\n.*?\n\n(.*)", outcome.out, re.DOTALL)[0]
    file = tmp_path / "keys.toml"
    file.write_text(section)
    assert Keys.read(file).owner(key) == "alice"
    with pytest.raises(UnauthorizedError):
        Keys.read(file).owner(key + "x")
    assert key not in section
    assert 'tokens = "2000/minute"\nseconds = "9/hour"' in section


@pytest.mark.parametrize("field", ["tokens", "seconds"])
def test_make_key_refuses_bad_allowances(field: str) -> None:
    with pytest.raises(UsageError, match=f"--{field}"):
        make_key("ok", None, **{field: ""})


@pytest.mark.parametrize(("name", "rate"), [("a b", None), ("", None), ("ok", "often"), ("ok", "")])
def test_make_key_refuses_bad_arguments(name: str, rate: str | None) -> None:
    with pytest.raises(UsageError):
        make_key(name, rate)


DIGEST = "a" * 64


@pytest.mark.parametrize(
    ("content", "mentioned"),
    [
        ("", "no keys"),
        ("[alice", "keys.toml"),
        ("[alice]", r"alice\.sha256"),
        ("[alice]\nsha256 = 'secret'", r"alice\.sha256"),
        (f"[alice]\nsha256 = '{DIGEST}'\nrate = 'often'", r"alice\.rate"),
        (f"[alice]\nsha256 = '{DIGEST}'\ncolor = 1", r"alice\.color"),
        (f"[alice]\nsha256 = '{DIGEST}'\ntokens = 'often'", r"alice\.tokens"),
        (f"[alice]\nsha256 = '{DIGEST}'\nseconds = 3", r"alice\.seconds"),
        ("alice = 1", "alice"),
        *(
            (f"[alice]\nsha256 = '{hashlib.sha256(blank).hexdigest()}'", r"alice\.sha256.*blank")
            for blank in (b"", b" ", b"\n", b"\r\n", b"\t")
        ),
        (
            f"[alice]\nsha256 = '{DIGEST}'\n[bob]\nsha256 = '{DIGEST}'\nadmin = true",
            r"bob\.sha256.*alice",
        ),
    ],
)
def test_invalid_keys_file_is_refused(content: str, mentioned: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match=mentioned):
        Keys.read(file)


@pytest.mark.parametrize(
    ("file", "folder", "warnings"),
    [
        (0o600, 0o755, []),
        (0o640, 0o1777, []),
        (0o604, 0o755, ["every user may read"]),
        (0o602, 0o755, ["every user may write"]),
        (0o646, 0o777, ["every user may write", "every user may read", "write the folder"]),
        (0o600, 0o702, ["write the folder"]),
    ],
)
@pytest.mark.parametrize("linked", [False, True])
def test_exposed_keys_file_gives_warning(
    linked: bool,
    file: int,
    folder: int,
    warnings: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = tmp_path / "open"
    place.mkdir()
    keys = place / "keys.toml"
    keys.write_text(make_key("alice", None)[1])
    keys.chmod(file)
    place.chmod(folder)
    path = keys
    if linked:
        path = tmp_path / "link.toml"
        path.symlink_to(keys)
    caplog.clear()
    Keys.read(path)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(warnings)
    for message, warning in zip(messages, warnings, strict=True):
        assert warning in message
        assert str(path) in message
        assert "chmod" in message


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("60/minute", ["60 per 1 minute"]),
        (" 1 per 2 hours, 3/DAY ;0/month", ["1 per 2 hour", "3 per 1 day", "0 per 1 month"]),
        *((text, []) for text in ("", "x", "6/minut", "1/0hour", "1/hour;", "1/hour 2/day")),
    ],
)
def test_rates_are_parsed(text: str, shown: list[str]) -> None:
    if shown:
        assert list(map(str, api_keys._parse_rates(text))) == shown
    else:
        with pytest.raises(ValueError, match="expected a rate such as 60/minute, got"):
            Key(sha256=DIGEST, rate=text)
