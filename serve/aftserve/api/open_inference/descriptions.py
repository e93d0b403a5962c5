"""Descriptions of the server and its models, the same over HTTP and gRPC."""

from collections.abc import Sequence

from aftexport import __version__
from aftserve.api.open_inference import messages
from aftserve.api.open_inference.columns import outputs_of
from aftserve.api.open_inference.schemas import ModelMetadata, ServerMetadata, TensorMetadata
from aftserve.errors import NotFoundError
from aftserve.serving.service import Service

VERSION = "1"
"""Version of every model; a server has only this one."""
_PLATFORMS = {"onnxruntime": "onnxruntime_onnx", "tensorrt": "tensorrt_plan"}


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
