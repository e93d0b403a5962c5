"""The server as a Ray Serve deployment: replicas with a model each, behind Ray's HTTP proxy."""

import inspect
import logging
import signal
import threading
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import Field, ValidationError
from rich.console import Console

from aftexport.bundle import Bundle
from aftexport.errors import BundleError, UsageError
from aftexport.interruption import Interruption
from aftserve.api.api_keys import Keys
from aftserve.app import create_app
from aftserve.observability import tracing
from aftserve.observability.logging import configure_logging
from aftserve.ray.cluster import ClusterError, connected, resolve
from aftserve.server import load
from aftserve.settings import Settings

NAME = "aftserve"
"""Of the application, and of its one deployment."""
_OURS = ("name", "func_or_class", "version", "user_config", "route_prefix", "logging_config")
"""Options of a deployment that are not a matter of how many replicas run, and where."""
_OBJECT_STORE_MIB = 80
"""Requests do not go through it; Ray takes no less."""
_POLL_SECONDS = 2.0


class DeploymentSettings(Settings):
    """The server's settings, with Ray Serve's in a section of the file."""

    ray: dict[str, Any] = Field({}, description="options of a Ray Serve deployment")


class Replica:
    """One process of the deployment; Ray Serve sends it requests once it is constructed.

    Args:
        settings: of the server.
        digest: of the bundle that all replicas serve.
    """

    def __init__(self, settings: Settings, digest: str) -> None:
        configure_logging(settings.log_format)
        self._keys = Keys.read(settings.api_keys) if settings.api_keys is not None else None
        self._service = load(settings, Console(quiet=True), tracing.configure())
        if self._service.served.bundle.digest != digest:
            raise BundleError(
                settings.bundle, "it is not the bundle that was deployed", "Deploy it again."
            )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The application; Ray Serve runs its lifespan."""
        return create_app(self._service, self._keys, replica=True)

    def check_health(self) -> None:
        """Has the replica replaced, by an exception, where it does not answer."""
        if not self._service.health.answers:
            raise RuntimeError(f"The server is {self._service.health.status}.")


def deploy(
    settings: DeploymentSettings, address: str | None, console: Console, interruption: Interruption
) -> int:
    """Deploys a bundle; on a Ray of its own, serves until it is told to stop.

    Args:
        settings: of each replica, and of the deployment.
        address: of a Ray cluster; see ``resolve``.
        console: where progress goes.
        interruption: whose exception may be lost in a callback of Ray's.

    Returns:
        The exit status.

    Raises:
        AftexportError: where it cannot be deployed.
    """
    address = resolve(address)
    digest = Bundle.open(settings.bundle).digest
    options = deployment_options(settings)
    settings = settings.model_copy(
        update={
            **settings.absolute_paths,
            "threads": settings.threads or max(1, int(options["ray_actor_options"]["num_cpus"])),
        }
    )
    with connected(address, object_store_mib=_OBJECT_STORE_MIB):
        from ray import serve

        serve.start(http_options={"host": settings.host, "port": settings.port})
        application = _deployment(options).bind(settings, digest)
        try:
            serve.run(application, name=NAME)
        except RuntimeError as error:
            raise ClusterError(
                f"Ray Serve cannot deploy it: {str(error).strip().rstrip('.')}.",
                "Look at the replicas' log.",
            ) from error
        interruption.check()
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        where = f"http://{host}:{settings.port}"
        console.print(f"{settings.bundle.name} running on {where}", soft_wrap=True)
        if address is not None:
            return 0
        try:
            return _until_stopped()
        finally:
            serve.delete(NAME)  # which waits for accepted requests; a shutdown does not
            serve.shutdown()


def deployment_options(settings: DeploymentSettings) -> dict[str, Any]:
    """Ray Serve's options for the deployment: those of the file over ours.

    Raises:
        UsageError: for one that Ray Serve does not know, or does not take so.
    """
    given = settings.ray
    actor = given.get("ray_actor_options", {})
    if not isinstance(actor, dict):
        raise _bad("ray_actor_options is no table")
    _check_names(given)
    options = {
        # A replica refuses what it cannot answer in time; what Ray holds back it cannot see.
        "max_ongoing_requests": 1024,
        "max_constructor_retry_count": 3,
        "logging_config": {"enable_access_log": False},  # a request has a line of the server's
        "graceful_shutdown_timeout_s": settings.shutdown_seconds,
        **given,
        "ray_actor_options": {"num_cpus": settings.threads or 1, **actor},
    }
    try:
        _deployment(options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise _bad(f"{name}: {first['msg']}") from error
    except (TypeError, ValueError) as error:
        raise _bad(str(error)) from error
    return options


def _deployment(options: Mapping[str, Any]) -> Any:
    from ray import serve

    return serve.deployment(serve.ingress()(Replica)).options(name=NAME, **options)


def _check_names(given: Mapping[str, Any]) -> None:
    """Of the options and of autoscaling, where Ray Serve takes an unknown one for none."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig

    known = {
        name
        for name in inspect.signature(serve.Deployment.options).parameters
        if name not in (*_OURS, "self") and not name.startswith("_")
    }
    scaling = given.get("autoscaling_config")
    for place, options, names in (
        ("", given, known),
        ("autoscaling_config.", scaling, set(AutoscalingConfig.model_fields)),
    ):
        for name in options if isinstance(options, dict) else ():
            if name not in names:
                raise _bad(f"there is no option {place}{name}")


def _bad(reason: str) -> UsageError:
    return UsageError(
        f"[ray]: {reason.rstrip('.!')}.", "Ray Serve's documentation lists a deployment's options."
    )


def _until_stopped() -> int:
    """Waits for SIGTERM or an interrupt, or for the end of Ray Serve."""
    from ray import exceptions, serve

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    while not stop.wait(_POLL_SECONDS):
        try:
            serve.status()
        except exceptions.RayError:
            logging.getLogger("aftserve.deployment").exception("Ray Serve has ended")
            return 1
    return 0
