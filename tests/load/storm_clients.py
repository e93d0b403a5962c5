"""Clients of every interface at once: their keys, requests, departures and outcomes."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
import numpy as np

from load.changes import KeyRing, ServedModel
from load.client import Connection, ConnectionEndedError
from load.every_head import Document, Expected
from load.interfaces import INTERFACES, Found, Interface, Message

OK = ("200", "OK")
"""Statuses of answers."""
_UNAUTHORIZED = ("401", "UNAUTHENTICATED")
_BUSY = ("429", "RESOURCE_EXHAUSTED")
_ABSENT = ("404", "NOT_FOUND")
_LEAVING = 0.25
_MAX_PATIENCE_SECONDS = 0.1
_UNREADABLE = (ValueError, KeyError, TypeError, IndexError)
_DECISIONS = {"label", "labels", "holds", "spans"}
"""Fields that follow from the numbers; a rounding may change them where two numbers are close."""


@dataclass(frozen=True)
class Reply:
    """The end of a request that its client waited for."""

    status: str  # of HTTP, or the name of gRPC's; ended if the connection ended
    message: Message  # the response, or the text of the error


@dataclass(frozen=True)
class Outcome:
    """The outcome of a request."""

    name: str  # request ID in the server's log
    interface: Interface
    model: str
    documents: int
    status: str | None  # None if the client left

    @property
    def is_answered(self) -> bool:
        """Whether the client got answers."""
        return self.status in OK


class StormClients:
    """Clients that draw an interface, documents and a key for each request.

    A quarter of them leave: in the middle of their request, or before its answer.
    """

    def __init__(
        self,
        address: str,
        grpc_address: str,
        models: Sequence[ServedModel],
        keys: KeyRing,
        documents: Sequence[Document],
        *,
        bound: float,  # maximum error of a number; 0 for equal bits
    ) -> None:
        self._address = address
        self._grpc_address = grpc_address
        self._models = models
        self._keys = keys
        self._documents = documents
        self._bound = bound
        self.outcomes: list[Outcome] = []
        self.faults: list[str] = []

    async def send(self, names: Sequence[str], *, connections: int, seed: int) -> None:
        """Send a request of each name from concurrent clients."""
        waiting = iter(zip(names, itertools.cycle(INTERFACES), strict=False))

        async def client(number: int) -> None:
            generator = np.random.default_rng([seed, number])
            connection = Connection(self._address)
            async with grpc.aio.insecure_channel(self._grpc_address) as channel:
                for name, interface in waiting:
                    await self._ask(name, interface, connection, channel, generator)
            connection.close()

        await asyncio.gather(*map(client, range(connections)))

    async def _ask(
        self,
        name: str,
        interface: Interface,
        connection: Connection,
        channel: grpc.aio.Channel,
        generator: np.random.Generator,
    ) -> None:
        model = self._models[generator.integers(len(self._models))]
        count = generator.integers(1, interface.max_documents + 1)
        chosen = generator.integers(len(self._documents), size=count)
        documents = [self._documents[index] for index in chosen]
        key = self._keys.draw(generator)
        request = interface.write(model.name, documents)
        headers = {**request.headers, "X-API-Key": self._keys.key(key), "X-Request-ID": name}
        path = interface.path.format(model=model.name)
        if not interface.is_grpc and (
            not (interface.names_model or model.is_default) or generator.random() < 0.5
        ):
            path = model.prefix + path
        seen = _Seen.of(model, self._keys)
        reply = await self._send(
            interface, path, Message(request.body, headers), connection, channel, generator
        )
        status = None if reply is None else reply.status
        self.outcomes.append(Outcome(name, interface, model.name, len(documents), status))
        if reply is not None:
            fault = self._fault(interface, model, reply, documents, key, seen)
            if fault is not None:
                self.faults.append(f"{interface.name} of {model.name}: {fault} ({name})")

    async def _send(
        self,
        interface: Interface,
        path: str,
        request: Message,
        connection: Connection,
        channel: grpc.aio.Channel,
        generator: np.random.Generator,
    ) -> Reply | None:
        """Send a request; return None if its client leaves."""
        leaves, breaks_off = generator.random() < _LEAVING, generator.random() < 0.5
        if leaves and breaks_off and not interface.is_grpc:
            await connection.break_off(path, request.body, request.headers)
            return None
        patience = generator.uniform(0, _MAX_PATIENCE_SECONDS) if leaves else None
        try:
            async with asyncio.timeout(patience):
                if interface.is_grpc:
                    return await _call(channel, path, request)
                return await _post(connection, path, request)
        except TimeoutError:
            return None

    def _fault(
        self,
        interface: Interface,
        model: ServedModel,
        reply: Reply,
        documents: Sequence[Document],
        key: int | None,
        seen: "_Seen",
    ) -> str | None:
        """Return the fault of a reply."""
        if reply.status in (*OK, *_UNAUTHORIZED):
            fault = self._key_fault(reply, key, seen.key)
            if fault is not None or reply.status in _UNAUTHORIZED:
                return fault
        present = [one % 2 == 0 for one in model.presence.since(seen.presence)]
        if reply.status in OK:
            if not any(present):
                return "an answer of an unloaded model"
            return self._answer_fault(interface, model, reply.message, documents, seen.bundle)
        if reply.status in _ABSENT and not all(present):
            return None
        if reply.status in _BUSY:
            is_complete = "retry-after" in reply.message.headers
            return None if is_complete else f"{reply.status} without Retry-After"
        return f"{reply.status} {reply.message.body[:300]!r}"

    def _key_fault(self, reply: Reply, key: int | None, seen: int) -> str | None:
        """Return the fault of an accepted or refused key."""
        valid = self._keys.generations.since(seen)
        if reply.status in _UNAUTHORIZED:
            if key is None or list(valid) == [key]:
                return f"the valid key {key} is refused"
        elif reply.status in OK and key is not None:
            if key not in valid:
                return f"the key {key} is accepted after the key {seen}"
            self._keys.generations.show(key)
        return None

    def _answer_fault(
        self,
        interface: Interface,
        model: ServedModel,
        response: Message,
        documents: Sequence[Document],
        seen: int,
    ) -> str | None:
        """Return the fault of an answer."""
        generations = model.generations.since(seen)
        try:
            found = interface.read(response)
        except _UNREADABLE as error:
            return f"unreadable answer: {error!r}: {response.body[:300]!r}"
        if len(found) != len(documents):
            return f"{len(found)} answers for {len(documents)} documents"
        answered = list(zip(found, documents, strict=True))
        parts = [[one] for one in answered] if interface.is_by_document else [answered]
        for part in parts:
            if interface.is_by_document and not part[0][0]:
                continue  # the queue was too long
            matching = [one for one in generations if self._is_answered(part, model, one)]
            if not matching:
                return (
                    f"wrong answer for documents {[d.number for _, d in part]}: {part[0][0]!r:.300}"
                )
            if len(matching) == 1 and "bundle" in part[0][0]:
                model.generations.show(matching[0])
        return None

    def _is_answered(
        self, part: Sequence[tuple[Found, Document]], model: ServedModel, generation: int
    ) -> bool:
        return all(
            is_answer(found, model.expected(generation, one), self._bound) for found, one in part
        )


@dataclass(frozen=True)
class _Seen:
    """The generations that clients have seen when a request is sent."""

    bundle: int
    presence: int
    key: int

    @classmethod
    def of(cls, model: ServedModel, keys: KeyRing) -> Self:
        """Return the generations that clients have seen by now."""
        return cls(model.generations.seen, model.presence.seen, keys.generations.seen)


async def _post(connection: Connection, path: str, request: Message) -> Reply:
    try:
        response = await connection.exchange("POST", path, request.body, request.headers)
    except ConnectionEndedError as error:
        return Reply("ended", Message(repr(error.__cause__).encode()))
    return Reply(str(response.status), Message(response.body, response.headers))


async def _call(channel: grpc.aio.Channel, path: str, request: Message) -> Reply:
    metadata = [(name.lower(), value) for name, value in request.headers.items()]
    call = channel.unary_unary(path)(request.body, metadata=metadata)
    try:
        return Reply("OK", Message(await call))
    except grpc.aio.AioRpcError as error:
        trailing = {str(name): str(value) for name, value in error.trailing_metadata() or ()}
        return Reply(error.code().name, Message((error.details() or "").encode(), trailing))


def is_answer(found: Found, expected: Expected, bound: float) -> bool:
    """Return whether all fields of a response equal those of the bare model."""
    # expected: may have more fields
    # bound: relative to the larger of a number and 1; with 0 every bit must be equal
    return bool(found) and _is_same(found, expected, bound)


def _is_same(found: Any, expected: Any, bound: float) -> bool:
    if isinstance(found, dict):
        return found.keys() <= expected.keys() and all(
            _is_same(value, expected[name], bound)
            for name, value in found.items()
            if not (bound and name in _DECISIONS)
        )
    if isinstance(found, np.ndarray):
        wanted = np.asarray(expected, found.dtype)
        return found.shape == wanted.shape and _are_close(found, wanted, bound)
    if isinstance(found, list) and found and isinstance(found[0], dict):  # spans
        pairs = zip(found, expected, strict=False)
        return len(found) == len(expected) and all(_is_same(a, b, bound) for a, b in pairs)
    if bound and isinstance(found, list):
        return len(found) == len(expected) and _are_close(
            np.array(found), np.array(expected), bound
        )
    if bound and isinstance(found, float):
        return _are_close(np.array(found), np.array(expected), bound)
    return bool(found == expected)


def _are_close(found: Any, expected: Any, bound: float) -> bool:
    if not bound:
        return bool(found.tobytes() == expected.tobytes())
    return bool((np.abs(found - expected) <= bound * np.maximum(1, np.abs(expected))).all())
