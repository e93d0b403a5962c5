"""The settings of the server."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError, from_json
from pydantic_settings import (
    BaseSettings,
    CliPositionalArg,
    CliSuppress,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from aftexport.errors import UsageError
from aftexport.options import ModelSource
from aftexport.system.contract import MAX_TOKENS
from aftserve.adapter_names import ADAPTERS, NO_ADAPTER, check_adapters
from aftserve.setting_sources import (
    PREFIX,
    ConfigFile,
    Variables,
    check_flags,
    check_variables,
    explain,
    split_words,
)

_MAX_SECONDS = 366 * 86_400
"""A year. Timers of the system overflow far above it."""
Seconds = Annotated[float, Field(ge=0, le=_MAX_SECONDS, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, le=_MAX_SECONDS, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveMib = Annotated[float, Field(gt=0, le=1 << 30, allow_inf_nan=False)]


def _refuse_empty(path: Any) -> Any:
    if path == "":  # an empty path would mean the current folder
        raise PydanticCustomError("empty_path", "The path is empty")
    return path


def _refuse_boolean(number: Any) -> Any:
    if isinstance(number, bool):  # which is an integer to Python, and to pydantic
        raise PydanticCustomError("boolean", "Expected a number or a text, got a boolean")
    return number


Location = Annotated[Path, BeforeValidator(_refuse_empty)]
"""Path of a file or folder."""
Origin = Annotated[str, Field(pattern=r"^(\*|[^/\sA-Z]+://[^/\sA-Z]+)$")]
"""An origin as a browser sends it, in lower case and without a path; or * for all."""
Host = Annotated[str, Field(pattern=r"^(\*|\[[0-9a-f:.]+\]|[^*/\s:A-Z\[\]]+)$")]
"""A host as in a URL, in lower case and without a port; or * for all."""
Policy = Literal["exact", "reject", "head", "tail"]
AnswerPolicy = Literal[Policy, "windows"]
"""The policy of an answer: the setting, or the windows that the bundle declares."""
"""Treatment of a document over the memory budget."""

LogLevel = Literal["critical", "error", "warning", "info", "debug"]
"""The names of levels in uvicorn."""

_MIB = 1 << 20


class ModelSettings(BaseModel):
    """A section ``[models.NAME]`` of the file: settings of one of several models."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    reference: Location | None = None
    reference_factory: str | None = None
    reference_allow_pickle: bool = False
    reference_trust_remote_code: bool = False
    shadow: Annotated[Share, BeforeValidator(_refuse_boolean)] = 0


REFERENCE_SETTINGS = tuple(n for n in ModelSettings.model_fields if n.startswith("reference"))


class Settings(BaseSettings):
    """Serve bundles over HTTP. Flags override AFTSERVE_* variables, which override --config."""

    model_config = SettingsConfigDict(
        frozen=True,
        env_prefix=PREFIX,
        cli_prog_name="aftserve",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_exit_on_error=False,
        protected_namespaces=(),
    )

    bundles: Annotated[CliPositionalArg[list[Location]], NoDecode] = Field(
        [Path()],
        min_length=1,
        description="folders written by aftexport, or folders of such folders, all of which SIGHUP "
        "reads again",
    )
    config: Location | None = Field(None, description="a TOML file of these settings")
    host: Annotated[list[str], NoDecode] = Field(
        ["127.0.0.1"],
        min_length=1,
        description="address to listen on, or several, separated by commas; :: for all of IPv6 and "
        "IPv4",
    )
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 for a free one")
    grpc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port for the Open Inference Protocol over gRPC at the addresses of --host, "
        "with TLS if there is a certificate; 0 for a free one. It needs the extra grpc",
    )
    uds: Location | None = Field(
        None,
        description="path of a Unix socket to listen on, and on no port unless --host or --port "
        "is given too",
    )

    ssl_certfile: Location | None = Field(
        None,
        description="a PEM file of the certificate chain, to speak HTTPS; without it, the server "
        "speaks plain HTTP. It is read again on SIGHUP and when it changes",
    )
    ssl_keyfile: Location | None = Field(
        None,
        description="a PEM file of the private key; by default the file of --ssl-certfile has it",
    )

    model_name: str | None = Field(
        None,
        pattern="^[^/]+$",  # it is one part of a path
        description="name of the model of the only bundle; by default a model has the name of its "
        "bundle's folder without .bundle",
    )
    models: CliSuppress[dict[str, ModelSettings]] = Field(
        {},
        description="settings of single models, in sections [models.NAME] of the file of --config: "
        + ", ".join(ModelSettings.model_fields),
    )
    api: Annotated[list[str], NoDecode] = Field(
        [*ADAPTERS],
        description="format of another server to answer beside /infer and /v2: "
        f"{', '.join(ADAPTERS)}, or package.module:callable for an adapter of your own. Repeat it, "
        f"or separate names by commas; {NO_ADAPTER} for none of them",
    )
    engine: Literal["auto", "onnxruntime", "tensorrt"] = Field(
        "auto",
        description="auto: TensorRT if the bundle has an engine and the machine its GPU. An "
        "engine is a program: serve only bundles that you trust",
    )
    provider: Literal["cpu", "cuda"] = Field(
        "cpu",
        description="execution provider of ONNX Runtime; cuda runs on an NVIDIA GPU and needs "
        "onnxruntime-gpu and the package aftexport-cuda",
    )
    threads: PositiveInt | None = Field(
        None,
        le=1024,
        description="threads of the engine; by default one for each core that affinity and CPU "
        "quota allow",
    )
    idle_seconds: float = Field(
        5,
        ge=0,
        description="time without a request after which the engine releases the memory of its "
        "runs; inf to keep it",
    )
    budget_tokens: PositiveInt = Field(
        16_384,
        description="maximum tokens of one run, padding included, unless one document has more; "
        "1 to run each document alone",
    )

    long_documents: Policy = Field(
        "exact",
        description="treatment of a document over the memory budget: run it in chunks with the "
        "same answer, or in the windows that the bundle declares; refuse it, or cut it to its head "
        "or tail",
    )
    memory_budget_mib: PositiveMib = Field(
        512,
        description="maximum MiB of one run beside the weights, as predicted; a longer document "
        "runs in chunks, or is refused if the model has none",
    )
    spill: Location | None = Field(
        None,
        description="folder for a document's values between layers while it runs in chunks; by "
        "default the system's folder for temporary files",
    )

    api_keys: Location | None = Field(
        None,
        description="a TOML file of API keys, made by aftserve key NAME; without it, no key is "
        "needed. It is read again on SIGHUP and when it changes",
    )
    allowed_hosts: Annotated[list[Host], NoDecode] = Field(
        [],
        description="host names that requests may use beside names of loopback, separated by "
        "commas; * for all. By default a server on loopback without API keys accepts only names "
        "of loopback, and other servers accept all",
    )
    cors_origins: Annotated[list[Origin], NoDecode] = Field(
        [],
        description="origins whose pages may send requests, such as https://example.org, "
        "separated by commas; none by default",
    )

    max_tokens: PositiveInt | None = Field(
        None,
        le=MAX_TOKENS,
        description="maximum tokens of a document; at most, and by default, the model's own limit "
        "or 1,048,576",
    )
    max_characters: PositiveInt = Field(1 << 24, description="maximum characters of a text")
    max_documents: PositiveInt = Field(256, description="maximum documents of one request")
    max_body_mib: PositiveMib = Field(16, description="maximum MiB of one request")
    max_array_mib: PositiveMib = Field(
        1024, description="maximum MiB of one document of features that is sent as a .npy file"
    )
    max_arrays_mib: PositiveMib = Field(
        4096, description="maximum MiB of the files for all documents of features"
    )
    max_buffered_mib: PositiveMib = Field(
        128, description="maximum MiB of all requests, each from its arrival to its answer"
    )

    max_queue_seconds: Seconds = Field(
        30, description="refuse a request if the queue before it is predicted to take longer"
    )
    deadline_seconds: PositiveSeconds = Field(
        300, description="maximum wait of a client; the header Deadline-Seconds shortens it"
    )
    receive_seconds: PositiveSeconds = Field(
        30,
        description="maximum time from the first byte of a request to the last of its body, and "
        "between two reads of its answer; over gRPC, to read all of its answer",
    )
    keep_alive_seconds: PositiveInt = Field(
        75,
        le=_MAX_SECONDS,
        description="time that a connection is kept for another request; it must exceed the "
        "keep-alive time of a proxy in front",
    )
    grpc_ping_seconds: float = Field(
        30,
        ge=0.1,
        le=86_400,
        description="time without a byte from a client of gRPC after which the server sends a "
        "ping, and then the time for its answer; a client without an answer has gone",
    )
    grpc_min_ping_seconds: float = Field(
        5,
        ge=0,
        le=86_400,
        description="minimum time between the keepalive pings of a client of gRPC; the connection "
        "of a client that sends them more often is closed",
    )
    stall_seconds: PositiveSeconds = Field(
        30,
        description="end the process if a run exceeds ten times its prediction by this time",
    )

    reference: Location | None = Field(
        None,
        description="the model file that the only bundle was exported from, to compare with; needs "
        "torch. With several, the section [models.NAME] of --config has that of each",
    )
    reference_factory: str | None = Field(
        None, description="package.module:callable, if --reference is a bare state dict"
    )
    reference_allow_pickle: bool = Field(
        False, description="allow --reference to be a pickled module, whose code is run"
    )
    reference_trust_remote_code: bool = Field(
        False,
        description="allow --reference to be a transformers folder with a class of its own, whose "
        "code is run",
    )
    shadow: Share = Field(
        0,
        description="share of live documents that are also compared, if they have at most 65,536 "
        "tokens",
    )
    on_breach: Literal["unready", "fallback"] = Field(
        "unready",
        description="if parity is broken: refuse requests, or run only the fallbacks",
    )

    drain_seconds: Seconds = Field(
        1, description="time after SIGTERM in which the server reports not ready but still serves"
    )
    shutdown_seconds: PositiveSeconds = Field(
        60, description="time after --drain-seconds for the answers to accepted requests"
    )

    log_format: Literal["text", "json"] = Field(
        "text", description="format of the log, which has one line for each event"
    )
    log_level: LogLevel = Field(
        "info",
        description="lowest level of the log; debug adds the requests for health and metrics",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_number(cls, value: Any, info: ValidationInfo) -> Any:
        is_switch = cls.model_fields[str(info.field_name)].annotation is bool
        return value if is_switch else _refuse_boolean(value)

    @field_validator("api", "bundles", "host", "allowed_hosts", "cors_origins", mode="before")
    @classmethod
    def _split(cls, names: Any) -> Any:
        """Parse the list of a flag or a variable: JSON, or names separated by commas."""
        if not isinstance(names, str):
            return names
        # pydantic-settings makes JSON of a flag, and keeps empty names in it. [::1] is not JSON.
        parts = from_json(names) if re.match(r"\[\s*[\]\"]", names) else names.split(",")
        return [name for name in parts if name != ""]

    @field_validator("host", mode="after")
    @classmethod
    def _without_brackets(cls, hosts: list[str]) -> list[str]:
        """Accept an address of IPv6 as it stands in a URL."""
        return [re.sub(r"^\[(.*)\]$", r"\1", host) for host in hosts]

    _known_adapters = field_validator("api", mode="after")(check_adapters)

    @property
    def port_hosts(self) -> list[str]:
        """The hosts at whose port the server listens; none if it has only a Unix socket."""
        is_given = bool({"host", "port"} & self.model_fields_set)
        return self.host if is_given or self.uds is None else []

    @property
    def bundle(self) -> Path:
        """The only bundle.

        Raises:
            UsageError: if there are several, or a folder of bundles.
        """
        from aftexport.bundle.output_path import folder_or_none  # slow: it imports onnx

        if len(self.bundles) > 1:
            raise UsageError(
                f"Expected one bundle, got {', '.join(map(str, self.bundles))}.", "Name one."
            )
        folder = folder_or_none(self.bundles[0])
        if folder is not None and folder.bundles:
            raise UsageError(
                f"Expected one bundle, got {self.bundles[0]}, a folder of bundles.",
                f"Name one, such as {folder.bundles[0]}.",
            )
        return self.bundles[0]

    def of_model(self, name: str) -> Self:
        """Return the settings of a model: these, and those of its section."""
        own = self.models.get(name, ModelSettings())
        given = {name: value for name, value in own if name in own.model_fields_set}
        return self.model_copy(update=given)

    @property
    def reference_source(self) -> ModelSource:
        """The model to compare with."""
        return ModelSource(
            self.reference,
            self.reference_factory,
            self.reference_allow_pickle,
            self.reference_trust_remote_code,
        )

    @property
    def memory_budget(self) -> int:
        """Bytes that one document may take beside the model."""
        return int(self.memory_budget_mib * _MIB)

    @property
    def max_body_bytes(self) -> int:
        """Maximum bytes of one request."""
        return int(self.max_body_mib * _MIB)

    @property
    def max_array_bytes(self) -> int:
        """The maximum size of a body with an array of features."""
        return int(self.max_array_mib * _MIB)

    @property
    def max_arrays_bytes(self) -> int:
        """The maximum size of the files for all documents of features."""
        return int(self.max_arrays_mib * _MIB)

    @property
    def max_buffered_bytes(self) -> int:
        """Maximum bytes of all requests, each from its arrival to its answer."""
        return int(self.max_buffered_mib * _MIB)

    @property
    def absolute_paths(self) -> dict[str, Any]:
        """The settings with files and folders, whose paths are absolute."""
        models = {name: own.model_copy(update=_absolute(own)) for name, own in self.models.items()}
        bundles = [path.absolute() for path in self.bundles]
        return {**_absolute(self), "bundles": bundles, "models": models}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources after the command line; the first with a value wins."""
        return init_settings, Variables(settings_cls), ConfigFile(settings_cls)

    @classmethod
    def read(cls, arguments: Sequence[str]) -> Self:
        """Read the settings of a command line; UsageError if one cannot be used."""
        check_variables(cls.model_fields)
        check_flags(arguments, cls.model_fields)
        flags, bundles = split_words(arguments, cls.model_fields)
        # Not by the parser, which would split a path at its commas.
        named: dict[str, Any] = {"bundles": bundles} if bundles else {}
        try:
            return cls(_cli_parse_args=flags, **named)  # type: ignore[call-arg]
        except ValidationError as error:
            raise explain(error, cls.model_fields, ModelSettings.model_fields) from error
        except SettingsError as error:
            problem = str(error).removeprefix("error parsing CLI: ")
            raise UsageError(f"{problem}.", "See aftserve --help.") from error


def _absolute(settings: BaseModel) -> dict[str, Path]:
    """Return the paths of settings, as absolute paths."""
    return {name: path.absolute() for name, path in settings if isinstance(path, Path)}
