"""The server as a Ray Serve deployment: replicas with one model each, behind Ray's HTTP proxy."""

import inspect
import logging
import signal
import threading
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import Field, ValidationError
from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftexport.errors import BundleError, UsageError
from aftexport.system.process import Interruption
from aftserve.api.api_keys import KeyFile
from aftserve.app import create_app
from aftserve.observability import tracing
from aftserve.observability.logging import configure_logging
from aftserve.ray.cluster import ClusterError, check_gpus, connected, resolve
from aftserve.server import load
from aftserve.settings import Settings

NAME = "aftserve"
"""Name of the application and of its only deployment."""
_OURS = ("name", "func_or_class", "version", "user_config", "route_prefix", "logging_config")
"""Options of a deployment that the user cannot set."""
_OBJECT_STORE_MIB = 80
"""Ray's minimum; requests do not use the object store."""
_POLL_SECONDS = 2.0


class DeploymentSettings(Settings):
    """The server's settings, and Ray Serve's options in a section of the file."""

    ray: dict[str, Any] = Field({}, description="options of a Ray Serve deployment")


class Replica:
    """A process of the deployment, which Ray Serve sends requests after its construction."""

    def __init__(self, settings: Settings, digest: str) -> None:
        configure_logging(settings.log_format, settings.log_level)
        self._key_file = KeyFile(settings.api_keys) if settings.api_keys is not None else None
        self._models = load(settings, Console(quiet=True), tracing.configure())
        found = [service.active.bundle.digest for service in self._models.loaded()]
        if found != [digest]:
            raise BundleError(
                settings.bundle, "it is not the bundle that was deployed", "Deploy it again."
            )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application; Ray Serve runs its lifespan."""
        return create_app(self._models, self._key_file, replica=True)

    def check_health(self) -> None:
        """Raise if the replica does not answer; Ray Serve then replaces it."""
        if not self._models.answers:
            raise RuntimeError(f"The server is {self._models.status}.")


def deploy(
    settings: DeploymentSettings, address: str | None, console: Console, interruption: Interruption
) -> int:
    """Deploy a bundle; with a Ray on this machine, serve until told to stop."""
    # Ray's callbacks may swallow the exception of an interruption.
    host = _host(settings)
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

        replicas = _first_replicas(options)
        gpus = options["ray_actor_options"].get("num_gpus", 0)
        check_gpus(replicas, gpus, f"{replicas} replicas")
        serve.start(http_options={"host": host, "port": settings.port})
        _start(_deployment(options).bind(settings, digest))
        interruption.check()
        where = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
        console.print(f"{settings.bundle.name} running on {where}", soft_wrap=True)
        if address is not None:
            return 0
        try:
            return _until_stopped()
        finally:
            serve.delete(NAME)  # waits for accepted requests, unlike shutdown
            serve.shutdown()


def _host(settings: DeploymentSettings) -> str:
    """Return the host of Ray's HTTP proxy; UsageError for settings that the proxy lacks."""
    end_tls = "Remove it, and end TLS in a proxy before Ray Serve."
    remedies = dict.fromkeys(("grpc_port", "uds"), "Remove it.")
    remedies |= dict.fromkeys(("ssl_certfile", "ssl_keyfile"), end_tls)
    for name, remedy in remedies.items():
        if getattr(settings, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} needs a server without Ray, got a deployment.", remedy)
    if len(settings.host) > 1:
        raise UsageError(
            f"Ray Serve listens at one --host, got {', '.join(settings.host)}.", "Name one."
        )
    return settings.host[0]


def _start(application: Any) -> None:
    from ray import serve

    try:
        serve.run(application, name=NAME)
    except RuntimeError as error:
        raise ClusterError(
            f"Ray Serve cannot deploy the bundle: {str(error).strip().rstrip('.')}.",
            "See the replicas' log.",
        ) from error


def deployment_options(settings: DeploymentSettings) -> dict[str, Any]:
    """Return Ray Serve's options for the deployment; the file overrides the defaults."""
    given = settings.ray
    actor = given.get("ray_actor_options", {})
    if not isinstance(actor, dict):
        raise _bad(f"ray_actor_options must be a table, got {actor!r}")
    _check_names(given)
    gpus = {"num_gpus": 1} if settings.provider == "cuda" else {}  # else Ray hides the GPUs
    options = {
        # Let replicas refuse late requests: they cannot see requests that Ray holds back.
        "max_ongoing_requests": 1024,
        "max_constructor_retry_count": 3,
        "logging_config": {"enable_access_log": False},  # the server has its own access log
        "graceful_shutdown_timeout_s": settings.shutdown_seconds,
        **given,
        "ray_actor_options": {"num_cpus": settings.threads or 1, **gpus, **actor},
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


def _first_replicas(options: Mapping[str, Any]) -> int:
    """Return the number of replicas without which the deployment is not ready."""
    number = options.get("num_replicas")
    if isinstance(number, int):
        return number
    return int((options.get("autoscaling_config") or {}).get("min_replicas", 1))


def _deployment(options: Mapping[str, Any]) -> Any:
    from ray import serve

    return serve.deployment(serve.ingress()(Replica)).options(name=NAME, **options)


def _check_names(given: Mapping[str, Any]) -> None:
    """Check the names of the options, because Ray Serve ignores unknown ones."""
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
        f"[ray]: {reason.rstrip('.!')}.", "See a deployment's options in Ray Serve's documentation."
    )


def _until_stopped() -> int:
    """Wait for SIGTERM, an interrupt, or the end of Ray Serve."""
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
