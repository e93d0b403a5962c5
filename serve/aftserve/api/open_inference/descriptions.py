"""Descriptions of the server, its models and their configuration, the same over HTTP and gRPC."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field

from aftexport import __version__
from aftexport.extra_inputs import TOKEN_TYPES
from aftserve.api.open_inference import messages
from aftserve.api.open_inference.columns import outputs_of
from aftserve.api.open_inference.schemas import ModelMetadata, ServerMetadata, TensorMetadata
from aftserve.errors import NotFoundError
from aftserve.serving.service import Service

VERSION = "1"
"""Version of every model; a server has only this one."""
_PLATFORMS = {"onnxruntime": "onnxruntime_onnx", "tensorrt": "tensorrt_plan"}
_DOCUMENTS = ("text", "input_ids")
"""Inputs of which a request has one, if the model has both."""


def check_version(name: str, version: str) -> None:
    """Raise NotFoundError unless a model has this version."""
    if version != VERSION:
        raise NotFoundError(
            f"Expected the model {name[:100]!r} of version {VERSION}, got version "
            f"{version[:100]!r}.",
            "Name the expected version.",
        )


def describe_server(extensions: Sequence[str]) -> ServerMetadata:
    """Return the metadata of the server with the extensions of an interface."""
    return ServerMetadata(name="aftserve", version=__version__, extensions=list(extensions))


def describe_model(service: Service) -> ModelMetadata:
    """Return the metadata of the model."""
    return ModelMetadata(
        name=service.name,
        versions=[VERSION],
        platform=platform_of(service),
        inputs=list(inputs_of(service)),
        outputs=list(outputs_of(service.model.classifier.manifest)),
    )


def platform_of(service: Service) -> str:
    """Return the name of the engine in the protocol."""
    engine = service.model.classifier.engine.name
    return _PLATFORMS.get(engine, engine)


def inputs_of(service: Service) -> Sequence[TensorMetadata]:
    """Return the inputs of the model."""
    classifier = service.model.classifier
    return messages.inputs_of(classifier.manifest, has_tokenizer=classifier.has_tokenizer)


class ConfigInput(BaseModel):
    """An input; -1 is any size. The first axis is that of the documents."""

    name: str
    data_type: str = Field(description="The type with the prefix `TYPE_`; texts are TYPE_STRING.")
    dims: list[int]
    optional: bool


class ConfigOutput(BaseModel):
    """An output; see the inputs."""

    name: str
    data_type: str
    dims: list[int]


class ConfigParameter(BaseModel):
    """The value of a parameter."""

    string_value: str


class VersionChoice(BaseModel):
    """The versions that are served."""

    versions: list[int]


class VersionPolicy(BaseModel):
    """The choice of versions."""

    specific: VersionChoice


class InstanceGroup(BaseModel):
    """The engine."""

    name: str
    kind: Literal["KIND_CPU", "KIND_GPU"]
    count: int


class ModelConfig(BaseModel):
    """The part of Triton's ModelConfig that the server has.

    `max_batch_size` is 0, which means that the shapes name every axis. A request may have several
    documents: the parameter `max_documents` has their maximum number.
    """

    name: str
    platform: str
    backend: str
    version_policy: VersionPolicy
    max_batch_size: int
    input: list[ConfigInput]
    output: list[ConfigOutput]
    instance_group: list[InstanceGroup]
    parameters: dict[str, ConfigParameter]


def model_config(
    metadata: ModelMetadata, engine: str, parameters: dict[str, str], *, is_on_gpu: bool
) -> ModelConfig:
    """Return the configuration of a model."""
    has_choice = {*_DOCUMENTS} <= {one.name for one in metadata.inputs}
    optional = {"lengths", *((*_DOCUMENTS, "text_pair", TOKEN_TYPES) if has_choice else ())}
    kind: Literal["KIND_CPU", "KIND_GPU"] = "KIND_GPU" if is_on_gpu else "KIND_CPU"
    return ModelConfig(
        name=metadata.name,
        platform=metadata.platform,
        backend=engine,
        version_policy=VersionPolicy(
            specific=VersionChoice(versions=[*map(int, metadata.versions)])
        ),
        max_batch_size=0,
        input=[
            ConfigInput(
                name=one.name,
                data_type=_type_of(one),
                dims=one.shape,
                optional=one.name in optional,
            )
            for one in metadata.inputs
        ],
        output=[
            ConfigOutput(name=one.name, data_type=_type_of(one), dims=one.shape)
            for one in metadata.outputs
        ],
        instance_group=[InstanceGroup(name=metadata.name, kind=kind, count=1)],
        parameters={key: ConfigParameter(string_value=text) for key, text in parameters.items()},
    )


def _type_of(tensor: TensorMetadata) -> str:
    return "TYPE_STRING" if tensor.datatype == "BYTES" else f"TYPE_{tensor.datatype}"
