"""Every setting of the server: as a flag, in the environment, or in a file."""

import os
import re
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, from_json
from pydantic_settings import (
    BaseSettings,
    CliPositionalArg,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from aftexport.contract import MAX_TOKENS
from aftexport.errors import UsageError

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _named(path: Any) -> Any:
    if path == "":  # what a script leaves empty would be the current folder
        raise PydanticCustomError("empty_path", "The path is empty")
    return path


Location = Annotated[Path, BeforeValidator(_named)]
"""Of a file or folder."""
Origin = Annotated[str, Field(pattern=r"^(\*|[^/\sA-Z]+://[^/\sA-Z]+)$")]
"""As a browser sends it, in small letters and without a path; or * for all."""
Host = Annotated[str, Field(pattern=r"^(\*|\[[0-9a-f:.]+\]|[^*/\s:A-Z\[\]]+)$")]
"""As a URL has it, in small letters and without a port; or * for any."""
Policy = Literal["exact", "reject", "head", "tail"]
"""What becomes of a document over the memory budget."""

_MIB = 1 << 20
_PREFIX = "AFTSERVE_"
_LINK = re.compile(r"(tcp|udp|sctp)://")
"""Begins AFTSERVE_PORT, as Kubernetes sets it in every pod beside a service named aftserve."""
_OF_SERVICES = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
"""End the other variables that it sets."""


class Settings(BaseSettings):
    """Serve a bundle over HTTP. Flags win over AFTSERVE_* variables, those over --config."""

    model_config = SettingsConfigDict(
        frozen=True,
        env_prefix=_PREFIX,
        cli_prog_name="aftserve",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        protected_namespaces=(),
    )

    bundle: CliPositionalArg[Location] = Field(
        Path(),
        description="a folder that aftexport wrote; SIGHUP takes it anew. Or one of the commands "
        "key, batch and deploy, which have a --help of their own",
    )
    config: Location | None = Field(None, description="a TOML file of these settings")
    host: str = Field(
        "127.0.0.1",
        min_length=1,  # of none, the system would make all there are
        description="address to listen on; :: for all of IPv6 and IPv4",
    )
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 for a free one")

    model_name: str | None = Field(
        None,
        pattern="^[^/]+$",  # it is one part of an address
        description="of the model below /v2; the bundle's folder, without .bundle, where left out",
    )
    engine: Literal["auto", "onnxruntime", "tensorrt"] = Field(
        "auto",
        description="auto: TensorRT where the bundle has an engine and the machine its GPU. An "
        "engine is a program: serve bundles you trust",
    )
    threads: PositiveInt | None = Field(
        None,
        description="threads of the engine; one for each core that affinity and CPU quota allow "
        "where it is left out",
    )
    idle_seconds: float = Field(
        5,
        ge=0,
        description="without a request for so long, the engine gives the memory of its runs back "
        "to the system; inf to keep it",
    )
    budget_tokens: PositiveInt = Field(
        16_384, description="most tokens of one run, padding included, unless one document has more"
    )

    long_documents: Policy = Field(
        "exact",
        description="what becomes of a document over the memory budget: run it in chunks with the "
        "same answer, refuse it, or cut it to its head or tail",
    )
    memory_budget_mib: Positive = Field(
        512, description="MiB one document may take beside the model; a longer one runs in chunks"
    )
    spill: Location | None = Field(
        None,
        description="folder for what such a document keeps between layers; the system's for "
        "temporary files where it is left out",
    )

    api_keys: Location | None = Field(
        None,
        description="a TOML file of API keys, made by aftserve key NAME; anybody may ask without",
    )
    allowed_hosts: Annotated[list[Host], NoDecode] = Field(
        [],
        description="names that requests may use as their Host, beside those of loopback, with "
        "commas between; or * for any. Left out: loopback's own where the server listens on that "
        "and asks for no API key, else any",
    )
    cors_origins: Annotated[list[Origin], NoDecode] = Field(
        [],
        description="origins whose pages a browser lets ask, as https://example.org, with commas "
        "between; none",
    )

    max_tokens: PositiveInt | None = Field(
        None,
        le=MAX_TOKENS,
        description="refuse longer documents; the model's own limit, 1,048,576 where it has none, "
        "where it is left out or over that",
    )
    max_characters: PositiveInt = Field(1 << 24, description="refuse longer texts")
    max_documents: PositiveInt = Field(256, description="most documents of one request")
    max_body_mib: Positive = Field(16, description="most MiB of one request")
    max_buffered_mib: Positive = Field(
        128, description="most MiB of all requests, each from its arrival to its answer"
    )

    max_queue_seconds: Seconds = Field(
        30, description="refuse a request where those before it take longer, as predicted"
    )
    deadline_seconds: Positive = Field(
        300, description="longest wait of a client; the header Deadline-Seconds shortens it"
    )
    receive_seconds: Positive = Field(
        30,
        description="time a client has from the first byte of its request to the last of its body, "
        "and to read some of its answer",
    )
    keep_alive_seconds: PositiveInt = Field(
        75,
        description="time a connection is kept for another request; longer than a proxy before "
        "the server keeps it, or that meets closed ones",
    )
    stall_seconds: Positive = Field(
        30, description="end the process where a run is late by this and ten times its prediction"
    )

    reference: Location | None = Field(
        None,
        description="the model file the bundle was exported from, to compare with; needs torch",
    )
    reference_factory: str | None = Field(
        None, description="package.module:callable, where that file is a bare state dict"
    )
    reference_allow_pickle: bool = Field(
        False, description="let that file be a pickled module, which runs code from it"
    )
    shadow: float = Field(
        0,
        ge=0,
        le=1,
        description="share of live documents, of up to 65,536 tokens, that are checked in passing",
    )
    on_breach: Literal["unready", "fallback"] = Field(
        "unready",
        description="where parity is broken: take no requests, or run the portable bodies alone",
    )

    drain_seconds: Seconds = Field(
        1, description="after SIGTERM, time to go on serving while not ready"
    )
    shutdown_seconds: Positive = Field(
        60, description="after that, time for accepted requests to be answered"
    )

    log_format: Literal["text", "json"] = Field("text", description="one line for each event")

    @field_validator("allowed_hosts", "cors_origins", mode="before")
    @classmethod
    def _listed(cls, names: Any) -> Any:
        """Of a flag or a variable: a list as JSON has it, or with commas between."""
        if not isinstance(names, str):
            return names
        if names.startswith("["):
            return from_json(names)
        return [name for name in names.split(",") if name]

    @property
    def served_name(self) -> str:
        """Of the model, in the Open Inference Protocol."""
        return self.model_name or self.bundle.absolute().name.removesuffix(".bundle")

    @property
    def memory_budget(self) -> int:
        """Bytes one document may take beside the model."""
        return int(self.memory_budget_mib * _MIB)

    @property
    def max_body_bytes(self) -> int:
        """Most bytes of one request."""
        return int(self.max_body_mib * _MIB)

    @property
    def max_buffered_bytes(self) -> int:
        """Most bytes of all requests that are being received."""
        return int(self.max_buffered_mib * _MIB)

    @property
    def absolute_paths(self) -> dict[str, Path]:
        """Every file and folder that is set, as a process elsewhere on this machine finds it."""
        return {name: path.absolute() for name, path in self if isinstance(path, Path)}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources after the command line, the first to have a value wins."""
        # As of OpenTelemetry's: what a script does not set, it may leave empty.
        environment = EnvSettingsSource(settings_cls, env_ignore_empty=True)
        environment.env_vars = {
            name: value
            for name, value in environment.env_vars.items()
            if not (name.upper() == f"{_PREFIX}PORT" and _LINK.match(value or ""))
        }
        return init_settings, environment, _ConfigFile(settings_cls)

    @classmethod
    def read(cls, arguments: Sequence[str]) -> Self:
        """Reads the settings; ``--help`` and words that are no flags end the process.

        Args:
            arguments: of the command line.

        Raises:
            UsageError: for a value that is out of range, and for a file that cannot be read.
        """
        cls._check_variables()
        try:
            return cls(_cli_parse_args=list(arguments))  # type: ignore[call-arg]
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":  # flags and variables are looked at before
                meant = " or ".join(
                    [*get_close_matches(name, cls.model_fields, 1), "aftserve --help"]
                )
                raise UsageError(
                    f"{name} in the file of --config is no setting.", f"Remove it, or see {meant}."
                ) from error
            flag = name if name == "bundle" else "--" + name.replace("_", "-")
            message = first["msg"][:1].lower() + first["msg"][1:]
            raise UsageError(f"{flag}: {message}.", "See aftserve --help.") from error
        except SettingsError as error:
            raise UsageError(f"{error}.", "See aftserve --help.") from error

    @classmethod
    def _check_variables(cls) -> None:
        """Refuses a variable that would not hold, unsaid: it is no setting, or holds no keys."""
        known = [f"{_PREFIX}{name.upper()}" for name in cls.model_fields]
        for name, value in os.environ.items():
            name = name.upper()
            if name == f"{_PREFIX}API_KEYS" and not value:
                raise UsageError(
                    f"{name} is empty: the server would answer to anybody.",
                    "Unset it, or name the file.",
                )
            if not name.startswith(_PREFIX) or name in known or _OF_SERVICES.search(name):
                continue
            if name.endswith("_PORT") and _LINK.match(value):
                continue
            meant = " or ".join([*get_close_matches(name, known, 1), "aftserve --help"])
            raise UsageError(f"{name} is no setting.", f"Unset it, or see {meant}.")


class _ConfigFile(PydanticBaseSettingsSource):
    """The TOML file that a source before it names."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError  # the base class asks for it; the file is read whole

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        if path is None:
            return {}
        try:
            return tomllib.loads(Path(path).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"--config {path}: {error}.", "Check the file.") from error
