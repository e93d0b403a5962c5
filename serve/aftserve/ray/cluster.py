"""A connection to a Ray cluster: an existing one, or one on this machine."""

import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aftexport.errors import AftexportError, UsageError
from aftexport.system.process import TerminatedError

_OWN = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a single machine listens only on loopback
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    # Do not wait for requests if Ray is stopped while it starts.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # A proxy may need more than the default 5 s to start, after which Ray would restart it.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
}

_CONNECT_SECONDS = 5.0
_LOOKS = 20
_LOOK_SECONDS = 0.1


class ClusterError(AftexportError):
    """Ray is not available."""


def resolve(address: str | None) -> str | None:
    """Return the address of the cluster to use; None for a Ray on this machine."""
    # Call it before ray is imported, because ray then reads the environment that is set here.
    # Ray's core also handles SIGTERM; on a slow machine the process then aborts.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        os.environ.update(_OWN, RAY_AUTH_TOKEN=secrets.token_hex(32))
    return address


@contextmanager
def connected(
    address: str | None, *, object_store_mib: int, cpus: int | None = None, logs: bool = True
) -> Iterator[None]:
    """Connect to Ray within the block; a Ray on this machine ends with it."""
    if address is not None:
        _check_reachable(address)
        with _ray(f"Ray at {address}", address=address, log_to_driver=logs):
            yield
        return
    with (
        _folder() as folder,
        _ray(
            "Ray on this machine",
            address="local",
            num_cpus=cpus,
            object_store_memory=object_store_mib << 20,
            include_dashboard=False,
            log_to_driver=logs,
            _temp_dir=folder,
        ),
    ):
        yield


def check_gpus(processes: int, gpus_each: float, option: str) -> None:
    """Check that the connected Ray has enough GPUs, because it would wait for them forever."""
    import ray

    needed, found = processes * gpus_each, ray.cluster_resources().get("GPU", 0)
    if found < needed:
        raise UsageError(
            f"Expected {needed:g} GPUs for {option}, got {found:g} in Ray.",
            "Check nvidia-smi and ray status, start fewer processes, or leave out --provider cuda.",
        )


@contextmanager
def _folder() -> Iterator[str]:
    """Make a folder with a short path, because a socket's path has at most 108 bytes."""
    folder = tempfile.mkdtemp(prefix="aftserve-")
    try:
        yield folder
    finally:
        for _ in range(_LOOKS):
            shutil.rmtree(folder, ignore_errors=True)
            if not Path(folder).exists():
                break
            time.sleep(_LOOK_SECONDS)  # a process that ends after Ray may still write its log


def _check_reachable(address: str) -> None:
    """Check that ``host:port`` can be reached, because Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return  # Ray looks auto up
    if not host or not port.isdigit():
        raise ClusterError(
            f"The address must be host:port, ray://host:port or auto, got {address}.",
            "Correct --address or RAY_ADDRESS.",
        )
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:  # OverflowError: a port over 65,535
        raise ClusterError(
            f"Ray at {address} cannot be reached ({error}).", "Check --address, or RAY_ADDRESS."
        ) from error


@contextmanager
def _ray(name: str, **options: Any) -> Iterator[None]:
    import ray

    if not options["log_to_driver"]:
        # Ray's core logs an error whenever Ray Data makes actors; failures raise exceptions.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    terminates = signal.getsignal(signal.SIGTERM)
    try:
        try:
            ray.init(configure_logging=False, **options)
        except SystemExit as end:  # Ray exits on SIGTERM while it starts
            raise TerminatedError from end
        except Exception as error:  # Ray raises a bare Exception if it does not start in time
            raise ClusterError(
                f"{name} is not available: {str(error).rstrip('.')}.",
                "Check the address, the space in /tmp and /dev/shm, and ray status.",
            ) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, terminates)
        yield
    finally:
        ray.shutdown()
