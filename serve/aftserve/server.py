"""From the start of the process to its end: load, serve, drain, exit."""

import asyncio
import gc
import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from rich.console import Console

import aftplugins
from aftexport.bundle.bundle import TOKENIZER, Bundle
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, operator_paths
from aftexport.engines.onnxruntime.providers import PROVIDERS
from aftexport.errors import UsageError
from aftexport.system.console import escape, operator_table, stage
from aftexport.system.installation import check_installed
from aftserve.api.api_keys import KeyFile
from aftserve.app import create_app
from aftserve.grpc.addresses import free_addresses
from aftserve.http.connection import Connection, raise_limit
from aftserve.http.listeners import (
    accept_waiting,
    bind,
    bind_unix,
    check_unix,
    close_all,
    is_unix,
    listen,
    remove_paths,
    urls,
)
from aftserve.http.tls import ServerCertificate, server_certificate
from aftserve.model.load import ActiveBundle, load_model
from aftserve.observability import tracing
from aftserve.observability.logging import ADDRESS_LOGGER, configure_logging, flush_output
from aftserve.observability.tracing import Traces
from aftserve.serving.bundle_paths import BundlePaths
from aftserve.serving.repository import ModelRepository
from aftserve.serving.service import SharedResources
from aftserve.setting_sources import PREFIX, section
from aftserve.settings import REFERENCE_SETTINGS, Settings

if TYPE_CHECKING:
    from aftserve.grpc.endpoint import Endpoint

logger = logging.getLogger(__name__)
address_logger = logging.getLogger(ADDRESS_LOGGER)

_RELOAD: signal.Signals | None = getattr(signal, "SIGHUP", None)
"""The signal that reloads the files; None on Windows, which lacks it."""
_ENGINE_THREAD = "engine"
"""Name of the thread of ``aftserve.scheduling.scheduler``."""
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the memory limit of the container: of control groups, version 2 and 1."""
_LAST_RUN_SECONDS = 0.5
"""Time for the engine's last run at the end of the server, which may be a measurement."""
_LAST_HANDSHAKE_SECONDS = 1.0
"""Time for the TLS handshake of a connection that is accepted at the end of the server."""


def serve(settings: Settings, console: Console) -> int:
    """Serve until the process is told to stop or fails; return its exit status."""
    if _RELOAD is not None:
        signal.signal(_RELOAD, signal.SIG_IGN)  # there is no bundle to reload yet
    # The first process of a container ignores SIGTERM without a handler, also while it loads.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    gc.freeze()  # keep modules out of every collection, which would delay requests
    configure_logging(settings.log_format, settings.log_level)
    key_file = KeyFile(settings.api_keys) if settings.api_keys is not None else None
    certificate = server_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    raise_limit()
    check_grpc(settings)
    traces = tracing.configure()
    check_addresses(settings)
    models = load(settings, console, traces)
    server = Server(models, key_file, certificate)
    gc.collect()
    gc.freeze()  # the application has most of the objects; an unload thaws them
    try:
        server.run()
    except SystemExit as end:  # raised by SIGTERM, or if the address was taken meanwhile
        return int(bool(end.code))
    traces.close()
    status = int(models.shared.health.phase == "failed")
    if status or models.shared.loader.loading or _engine_runs():
        # A hanging run, or a thread that loads a bundle, would block an orderly exit. The exit
        # functions of libraries would abort the process under a thread in ONNX Runtime.
        flush_output()
        os._exit(status)
    return 0


def _engine_runs() -> bool:
    """Return whether the engine's thread still runs, shortly after it was told to end."""
    engines = [one for one in threading.enumerate() if one.name == _ENGINE_THREAD]
    for one in engines:
        one.join(_LAST_RUN_SECONDS)
    return any(one.is_alive() for one in engines)


def check_addresses(settings: Settings) -> None:
    """Refuse addresses that are taken before the load, which may take minutes."""
    close_all(_bind_hosts(settings))
    if settings.uds:
        check_unix(settings.uds)


def open_listeners(settings: Settings, backlog: int) -> list[socket.socket]:
    """Listen at the addresses of the settings; UsageError if one is not available."""
    with ExitStack() as stack:
        listeners = _bind_hosts(settings)
        stack.callback(close_all, listeners)
        listen(listeners, backlog)
        unix = [bind_unix(settings.uds, backlog)] if settings.uds else []
        stack.pop_all()
    return [*listeners, *unix]


def _bind_hosts(settings: Settings) -> list[socket.socket]:
    return bind(settings.port_hosts, settings.port) if settings.port_hosts else []


def check_grpc(settings: Settings) -> None:
    """Check before the load that the server can answer gRPC."""
    if settings.grpc_port is None:
        return
    check_installed("grpc")
    check_installed("grpc_health")
    if settings.port_hosts and settings.grpc_port == settings.port != 0:
        raise UsageError(
            f"Expected two ports, got {settings.port} for --port and for --grpc-port.",
            "Choose another port by --grpc-port.",
        )
    free_addresses(settings.host, settings.grpc_port)


def load(settings: Settings, console: Console, traces: Traces | None = None) -> ModelRepository:
    """Load the bundles of the settings; raise AftexportError if one cannot be served."""
    paths = BundlePaths(settings)
    found = paths.find()
    for refusal in found.refused:
        raise refusal
    for problem in found.problems:
        logger.warning("%s", problem)
    for name in settings.models.keys() - found.paths.keys():
        raise UsageError(
            f"{section(name)} in the file of --config: expected the name of a model, "
            f"{', '.join(found.paths)}.",
            "Correct the name, or remove the section.",
        )
    for name in found.paths:
        _check_reference(name, settings)
    bundles = {name: _open_bundle(path, console) for name, (path, *_) in found.paths.items()}
    _check_effects(settings, list(bundles.values()))
    models = ModelRepository(paths, SharedResources(settings, traces))
    for name, (path, *_) in found.paths.items():
        models.add(name, path, _load_bundle(bundles[name], settings.of_model(name), console))
    _warn_about_memory(models)
    return models


def _check_effects(settings: Settings, bundles: Sequence[Bundle]) -> None:
    """Raise UsageError if a setting that was given has no effect on any of the models."""
    own = {name: settings.of_model(name) for name in settings.models}
    for name, given in settings.models.items():
        unused = [f for f in given.model_fields_set - {"shadow"} if getattr(given, f)]
        if unused and own[name].reference is None:
            raise UsageError(
                f"{section(name)} {unused[0]} needs a reference of the model, got none.",
                f"Set reference in that section, or leave {unused[0]} out.",
            )
    manifests = [bundle.manifest for bundle in bundles]
    if not manifests:
        return
    has_reference = bool(settings.reference or any(one.reference for one in own.values()))
    may_share = any(one.batching for one in manifests)
    has_features = any(one.features is not None for one in manifests)
    stores = (
        has_features
        or has_reference
        or any(
            one.chunked is not None or any(head.is_per_token for head in one.heads.values())
            for one in manifests
        )
    )
    only_tensorrt = settings.engine == "tensorrt" and settings.on_breach == "unready"
    effects = {
        "shadow": (
            has_reference or may_share,  # a document of a shared run is compared with its own run
            "a model with --reference, or whose documents may share a run",
        ),
        **dict.fromkeys(REFERENCE_SETTINGS, (has_reference, "--reference")),
        "threads": (not only_tensorrt, "ONNX Runtime"),
        "budget_tokens": (may_share, "a model whose documents may share a run"),
        "spill": (stores, "a model that runs in chunks, takes features or answers for tokens"),
        "max_array_mib": (has_features, "a model of features"),
        "max_arrays_mib": (has_features, "a model of features"),
        "max_characters": (
            any(TOKENIZER in bundle.files for bundle in bundles),
            "a model with a tokenizer",
        ),
    }
    for name, (has_effect, needed) in effects.items():
        if name in settings.model_fields_set and getattr(settings, name) and not has_effect:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} needs {needed}, got none.",
                f"Leave {option} out, also in the file of --config and in {PREFIX}{name.upper()}.",
            )


def _check_reference(name: str, settings: Settings) -> None:
    """Raise UsageError if the PyTorch model of a bundle cannot be loaded."""
    reference, own = settings.of_model(name).reference, settings.models.get(name)
    if reference is None:
        return
    if not reference.exists():
        is_own = own is not None and own.reference is not None
        option = f"{section(name)} reference" if is_own else "--reference"
        raise UsageError(
            f"{option} {reference} does not exist.",
            "Name the model file that the bundle was exported from.",
        )
    check_installed("torch")


def _open_bundle(path: Path, console: Console) -> Bundle:
    with stage(console, f"Checking {path}"):
        return Bundle.open(path)


def _load_bundle(bundle: Bundle, settings: Settings, console: Console) -> ActiveBundle:
    model = load_model(bundle, settings, console)
    console.print(f"Engine: {escape(model.reason)}", soft_wrap=True)
    if model.classifier.engine.name == OnnxRuntimeEngine.name and not model.uses_standard_ops_only:
        operators = operator_paths(bundle.model_path, provider=settings.provider)
        console.print(operator_table(bundle.manifest.operators, operators))
        why = aftplugins.missing(PROVIDERS[settings.provider].library)
        if why and bundle.manifest.operators:
            console.print(escape(why), soft_wrap=True)
    return ActiveBundle(bundle, model)


def memory_room() -> int | None:
    """Return the bytes that the limit leaves beside the memory of this process; None if unlimited.

    The result is 0 if the process has more than the limit, as shared pages may count for others.
    """
    for name in _MEMORY_LIMITS:
        try:
            limit = Path(name).read_text()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except OSError:
            continue
        if limit.strip().isdigit():  # else "max"
            return max(0, int(limit) - pages * mmap.PAGESIZE)
    return None


def _warn_about_memory(models: ModelRepository) -> None:
    """Warn if a document may take more memory than the container has left."""
    room, settings = memory_room(), models.settings
    if room is not None and room < settings.memory_budget:
        logger.warning(
            "the container's memory limit leaves %d MiB; a run that takes the %g MiB of"
            " --memory-budget-mib can end the process: raise the limit, or lower the budget",
            room >> 20,
            settings.memory_budget_mib,
        )


class Server(uvicorn.Server):
    """A server that stops in steps: not ready, no new connections, exit."""

    # SIGHUP reloads the files.

    def __init__(
        self,
        models: ModelRepository,
        key_file: KeyFile | None = None,
        certificate: ServerCertificate | None = None,
    ) -> None:
        settings, shared = models.settings, models.shared
        super().__init__(
            uvicorn.Config(
                create_app(models, key_file),
                http=Connection.within(
                    settings.receive_seconds, shared.metrics.responses, shared.health
                ),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=settings.keep_alive_seconds,
                # After --shutdown-seconds, every accepted request has an answer or an error.
                timeout_graceful_shutdown=int(settings.shutdown_seconds) + 5,
            )
        )
        self._settings = settings
        self._health = shared.health
        self._key_file = key_file
        self._certificate = certificate
        self._drain_seconds = settings.drain_seconds
        self._shutdown_seconds = settings.shutdown_seconds
        self._health.when_failed(self._leave)
        self._listeners = list[socket.socket]()
        self._models = models
        self._grpc: Endpoint | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the server is told to stop."""
        watch = self._certificate.watch.running() if self._certificate else nullcontext()
        async with watch:
            await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and to handle SIGHUP."""
        try:
            self._listeners = open_listeners(self._settings, self.config.backlog)
            self._grpc = self._bind_grpc()
        except UsageError as error:  # the address was taken meanwhile
            close_all(self._listeners)
            logger.error("%s", error)
            sys.exit(1)
        scheme = "http"
        if self._certificate is not None:
            self.config.ssl, scheme = self._certificate.context, "https"
        in_unix = [one for one in self._listeners if is_unix(one)]
        await super().startup([one for one in self._listeners if one not in in_unix])
        loop = asyncio.get_running_loop()
        self.servers += [
            await loop.create_unix_server(
                self._connection, sock=one, ssl=self.config.ssl, backlog=self.config.backlog
            )
            for one in in_unix
        ]
        if self._grpc is not None:
            await self._grpc.start()
        addresses = " and ".join(urls(self._listeners, scheme))
        address_logger.info("Uvicorn running on %s (Press CTRL+C to quit)", addresses)
        if _RELOAD is not None:
            loop.add_signal_handler(_RELOAD, self._reload)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the connections in the backlog, stop listening, and end in order."""
        loop = asyncio.get_running_loop()
        backlog = self.config.backlog
        remove_paths(self._listeners)
        accepted = [
            one for listener in self._listeners for one in accept_waiting(listener, backlog)
        ]
        for server in self.servers:
            server.close()
        tls: dict[str, Any] = {}
        if self.config.ssl is not None:
            tls = {"ssl": self.config.ssl, "ssl_handshake_timeout": _LAST_HANDSHAKE_SECONDS}
        connecting = (
            loop.connect_accepted_socket(self._connection, one, **tls) for one in accepted
        )
        await asyncio.gather(*connecting, return_exceptions=True)  # a handshake may fail
        if self._grpc is not None:  # before the end of the scheduler, which answers its calls
            for connection in list(self.server_state.connections):
                connection.shutdown()  # at the same time: it ends once its request is answered
            started = time.monotonic()
            await self._grpc.stop(self._shutdown_seconds, lambda: self.force_exit)
            limit = self.config.timeout_graceful_shutdown or 0
            self.config.timeout_graceful_shutdown = max(1, limit - int(time.monotonic() - started))
        await super().shutdown(self._listeners)

    def _bind_grpc(self) -> "Endpoint | None":
        """Bind the port of gRPC; None without one."""
        if self._settings.grpc_port is None:
            return None
        from aftserve.grpc.endpoint import Endpoint

        keys = self._key_file.keys if self._key_file is not None else None
        endpoint = Endpoint(self._models, keys, self._certificate)
        endpoint.bind(self._settings.host, self._settings.grpc_port)
        return endpoint

    def _connection(self) -> asyncio.Protocol:
        # uvicorn's own factory is local to its startup.
        protocol: Any = self.config.http_protocol_class
        connection: asyncio.Protocol = protocol(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=asyncio.get_running_loop(),
        )
        return connection

    def _reload(self) -> None:
        """Read the bundles, the API keys and the certificate again."""
        for one in (self._key_file, self._certificate):
            if one is not None:
                one.watch.start_reload()
        self._models.start_rescan()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first SIGTERM; end at once on an interrupt or a second signal."""
        if self._health.phase == "ready" and sig == signal.SIGTERM:
            self._health.phase = "draining"
            asyncio.get_event_loop().call_soon_threadsafe(self._drain)
        else:
            self.force_exit = self.should_exit
            self._leave()

    def _drain(self) -> None:
        """Serve for a while longer, so that load balancers see that the server is not ready."""
        logger.info("draining for %g s", self._drain_seconds)
        self._models.stop_loads()
        loop = asyncio.get_running_loop()
        loop.call_later(self._drain_seconds, self._leave)
        loop.call_later(self._drain_seconds + self._shutdown_seconds, self._give_up)

    def _leave(self) -> None:
        self.should_exit = True

    def _give_up(self) -> None:
        logger.error("accepted requests are not answered in %g s", self._shutdown_seconds)
        self._health.fail()
