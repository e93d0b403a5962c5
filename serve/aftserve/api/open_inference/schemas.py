"""JSON objects of the protocol."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, WithJsonSchema

from aftexport.extra_inputs import MAX_INPUTS
from aftserve.schemas import ARRAY_OR_LIST
from aftserve.serving.repository import State

Datatype = Literal["BYTES", "BOOL", "INT64", "INT32", "FP32"]


class TensorParameters(BaseModel):
    """Parameters of a tensor; unknown ones are ignored, as the protocol requires."""

    model_config = ConfigDict(extra="ignore")

    binary_data_size: NonNegativeInt | None = Field(
        default=None, description="Bytes of the tensor, after the JSON, in the order of the inputs."
    )
    binary_data: bool | None = Field(
        default=None, description="For an output: send it after the JSON."
    )
    classification: int | None = Field(default=None, description="Not supported.")


class RequestParameters(BaseModel):
    """Parameters of a request; unknown ones are ignored, as the protocol requires."""

    model_config = ConfigDict(extra="ignore")

    binary_data_output: bool | None = Field(
        default=None, description="Send every output after the JSON."
    )


class InputTensor(BaseModel):
    """One input, whose values are in the JSON, nested or flat, or follow it."""

    name: str
    shape: list[Annotated[int, Field(ge=0, lt=1 << 31)]] = Field(max_length=3, fail_fast=True)
    datatype: Datatype
    parameters: TensorParameters | None = None
    data: Annotated[list[Any], ARRAY_OR_LIST] | None = None


class RequestedOutput(BaseModel):
    """One requested output."""

    name: str
    parameters: TensorParameters | None = None


class InferenceRequest(BaseModel):
    """Documents: the input ``text``, or tokens and, if lengths differ, ``lengths``.

    Tokens are ``input_ids``, or ``input_features`` of a model of features. Extra inputs of a model
    have tensors of their names.
    """

    id: str | None = None
    parameters: RequestParameters | None = None
    inputs: list[InputTensor] = Field(min_length=1, max_length=2 + MAX_INPUTS, fail_fast=True)
    outputs: list[RequestedOutput] | None = Field(default=None, max_length=256, fail_fast=True)


class TensorMetadata(BaseModel):
    """Name, type and shape of an input or output; -1 is any size."""

    name: str
    datatype: Datatype
    shape: list[int]
    parameters: dict[str, list[str]] | None = Field(
        default=None, description="`labels`: the names for which the numbers of an output stand."
    )


class ModelMetadata(BaseModel):
    """The model of the server."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(BaseModel):
    """The server."""

    name: str
    version: str
    extensions: list[str]


class Live(BaseModel):
    """Whether the process is alive."""

    live: bool


class Ready(BaseModel):
    """Whether the server takes requests."""

    ready: bool


class ModelReady(BaseModel):
    """Whether the model answers."""

    name: str
    ready: bool


class _RepositoryRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class RepositoryIndexRequest(_RepositoryRequest):
    """The models that a list has."""

    ready: bool = Field(False, description="Whether the list has only models that are ready.")


class RepositoryLoadRequest(_RepositoryRequest):
    """A load, which takes no parameters: names and settings of models are those of the server."""

    parameters: Annotated[
        dict[str, Any] | None, WithJsonSchema({"type": ["object", "null"], "maxProperties": 0})
    ] = None


class RepositoryUnloadRequest(_RepositoryRequest):
    """An unload; no model depends on another."""

    parameters: Annotated[
        dict[str, Any] | None,
        WithJsonSchema(
            {
                "type": ["object", "null"],
                "properties": {"unload_dependents": {"const": False}},
                "additionalProperties": False,
            }
        ),
    ] = None


class ModelIndex(BaseModel):
    """The state of a model that is loaded or can be."""

    name: str
    version: str
    state: State
    reason: str = Field(description="The reason why the model is not ready; empty if it is.")


class ProtocolProblem(BaseModel):
    """The problem of a request, and its remedy."""

    error: str


class OutputTensor(BaseModel):
    """One output, in the order of the documents; without ``data`` its bytes follow the JSON."""

    name: str
    shape: list[int]
    datatype: Datatype
    parameters: dict[str, int] | None = None
    data: list[str] | list[int] | list[float] | None = None


class InferenceResponse(BaseModel):
    """The outputs for all documents."""

    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, str] = Field(
        description="The policy for long documents, its windows, and the bundle."
    )
    outputs: list[OutputTensor]
