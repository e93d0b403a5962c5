"""The Ray that work runs on: a cluster that is there, or one of this machine's own."""

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

from aftexport.errors import AftexportError
from aftexport.interruption import TerminatedError

_OWN = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # of one machine: it listens to loopback alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    # Told to stop while it starts, it has nobody to wait for.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # A proxy that is not ready after 5 s is started again, though all that starts keeps it waiting.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
}

_CONNECT_SECONDS = 5.0
_LOOKS = 20
_LOOK_SECONDS = 0.1


class ClusterError(AftexportError):
    """There is no Ray to run on."""


def resolve(address: str | None) -> str | None:
    """The address of the cluster to run on; None for this machine's own Ray.

    Called before ray is imported, which reads the environment that is set here.

    Args:
        address: that was asked for; where there is none, ``RAY_ADDRESS`` may have one.
    """
    # Its core's handler takes SIGTERM too, and where there is half a core the process aborts.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        os.environ.update(_OWN, RAY_AUTH_TOKEN=secrets.token_hex(32))
    return address


@contextmanager
def connected(
    address: str | None, *, object_store_mib: int, cpus: int | None = None, logs: bool = True
) -> Iterator[None]:
    """Runs the block with Ray at hand; an own one ends with it.

    Args:
        address: as ``resolve`` has it.
        object_store_mib: of an own one, in shared memory.
        cpus: that an own one gives out; the machine's where it is None.
        logs: whether standard error shows what its processes write to theirs.

    Raises:
        ClusterError: where it cannot be reached, or does not start.
    """
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


@contextmanager
def _folder() -> Iterator[str]:
    """The system's: the path of a socket in it must stay below 108 bytes."""
    folder = tempfile.mkdtemp(prefix="aftserve-")
    try:
        yield folder
    finally:
        for _ in range(_LOOKS):
            shutil.rmtree(folder, ignore_errors=True)
            if not Path(folder).exists():
                break
            time.sleep(_LOOK_SECONDS)  # what ends after Ray may still write to its log


def _check_reachable(address: str) -> None:
    """Whether somebody listens at ``host:port``; Ray would ask for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return  # auto, which Ray looks up
    if not host or not port.isdigit():
        raise ClusterError(
            f"{address} is no address of a Ray cluster.",
            "Give --address, or RAY_ADDRESS, as host:port, ray://host:port or auto.",
        )
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:  # of a port over 65,535
        raise ClusterError(
            f"Ray at {address} cannot be reached ({error}).", "Check --address, or RAY_ADDRESS."
        ) from error


@contextmanager
def _ray(name: str, **options: Any) -> Iterator[None]:
    import ray

    if not options["log_to_driver"]:
        # Ray's core calls it an error how Ray Data makes actors; what fails is an exception.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    terminates = signal.getsignal(signal.SIGTERM)
    try:
        try:
            ray.init(configure_logging=False, **options)
        except SystemExit as end:  # while it starts, Ray answers to SIGTERM
            raise TerminatedError from end
        except Exception as error:  # of one that does not start in time, Ray raises no other
            raise ClusterError(
                f"{name} cannot be had: {str(error).rstrip('.')}.",
                "Check the address, the space in /tmp and /dev/shm, and ray status.",
            ) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, terminates)
        yield
    finally:
        ray.shutdown()
