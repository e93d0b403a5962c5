"""The protobuf messages of the Open Inference Protocol.

https://github.com/kserve/open-inference-protocol (specification/protocol/open_inference_grpc.proto)
https://github.com/triton-inference-server/common (protobuf/grpc_service.proto)

The messages are built from a table, so that no generated code depends on one version of protobuf.
Their pool is their own: a client in the same process may register messages of the same names.
"""

from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from aftexport.errors import InputError

SERVICE = "inference.GRPCInferenceService"
"""Name of the service."""
_PACKAGE = "inference"
_NAME_AND_VERSION = "name=1:string version=2:string"
_TENSOR = "name=1:string datatype=2:string shape=3:int64*"
_FULL_TENSOR = f"{_TENSOR} parameters=4:map<InferParameter> contents=5:InferTensorContents"
_MODEL_CHANGE = (
    "repository_name=1:string model_name=2:string parameters=3:map<ModelRepositoryParameter>"
)
_MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live=1:bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready=1:bool",
    "ModelReadyRequest": _NAME_AND_VERSION,
    "ModelReadyResponse": "ready=1:bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name=1:string version=2:string extensions=3:string*",
    "ModelMetadataRequest": _NAME_AND_VERSION,
    "ModelMetadataResponse": "name=1:string versions=2:string* platform=3:string "
    "inputs=4:ModelMetadataResponse.TensorMetadata* "
    "outputs=5:ModelMetadataResponse.TensorMetadata*",
    "ModelMetadataResponse.TensorMetadata": _TENSOR,
    "InferParameter": "bool_param=1:bool|choice int64_param=2:int64|choice "
    "string_param=3:string|choice double_param=4:double|choice uint64_param=5:uint64|choice",
    "InferTensorContents": "bool_contents=1:bool* int_contents=2:int32* int64_contents=3:int64* "
    "uint_contents=4:uint32* uint64_contents=5:uint64* fp32_contents=6:float* "
    "fp64_contents=7:double* bytes_contents=8:bytes*",
    "ModelInferRequest": "model_name=1:string model_version=2:string id=3:string "
    "parameters=4:map<InferParameter> inputs=5:ModelInferRequest.InferInputTensor* "
    "outputs=6:ModelInferRequest.InferRequestedOutputTensor* raw_input_contents=7:bytes*",
    "ModelInferRequest.InferInputTensor": _FULL_TENSOR,
    "ModelInferRequest.InferRequestedOutputTensor": "name=1:string "
    "parameters=2:map<InferParameter>",
    "ModelInferResponse": "model_name=1:string model_version=2:string id=3:string "
    "parameters=4:map<InferParameter> outputs=5:ModelInferResponse.InferOutputTensor* "
    "raw_output_contents=6:bytes*",
    "ModelInferResponse.InferOutputTensor": _FULL_TENSOR,
    "ModelRepositoryParameter": "bool_param=1:bool|choice int64_param=2:int64|choice "
    "string_param=3:string|choice bytes_param=4:bytes|choice",
    "RepositoryIndexRequest": "repository_name=1:string ready=2:bool",
    "RepositoryIndexResponse": "models=1:RepositoryIndexResponse.ModelIndex*",
    "RepositoryIndexResponse.ModelIndex": f"{_NAME_AND_VERSION} state=3:string reason=4:string",
    "RepositoryModelLoadRequest": _MODEL_CHANGE,
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": _MODEL_CHANGE,
    "RepositoryModelUnloadResponse": "",
}
"""Fields ``name=number:type`` of each message.

``*`` marks a repeated field, ``map<TYPE>`` messages by name, and ``|choice`` the members of a
oneof.
"""
_ONEOF = "parameter_choice"


def _add_field(message: DescriptorProto, text: str, place: str) -> None:
    """Add a field to a message."""
    # text: the field as in the table
    # place: full name of the message, with a dot at its start
    name, _, rest = text.partition("=")
    number, _, kind = rest.partition(":")
    field = message.field.add(name=name, number=int(number))
    field.label = FieldDescriptorProto.LABEL_OPTIONAL
    if kind.startswith("map<"):
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _add_field(entry, "key=1:string", "")
        _add_field(entry, f"value=2:{kind[len('map<') : -1]}", "")
        field.label = FieldDescriptorProto.LABEL_REPEATED
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f"{place}.{entry.name}"
        return
    if kind.endswith("*"):
        field.label = FieldDescriptorProto.LABEL_REPEATED
    if kind.endswith("|choice"):
        field.oneof_index = 0
    kind = kind.removesuffix("*").removesuffix("|choice")
    if kind in _MESSAGES:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"
    else:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name="open_inference.proto", package=_PACKAGE, syntax="proto3")
    top: dict[str, DescriptorProto] = {}
    for name, fields in _MESSAGES.items():
        outer, _, inner = name.partition(".")
        message = top[outer].nested_type.add(name=inner) if inner else file.message_type.add()
        if not inner:
            message.name = outer
            top[outer] = message
        if "|choice" in fields:
            message.oneof_decl.add(name=_ONEOF)
        for field in fields.split():
            _add_field(message, field, f".{_PACKAGE}.{name}")
    return file


def _classes() -> dict[str, Any]:
    pool = DescriptorPool()
    pool.AddSerializedFile(_file().SerializeToString())
    return {
        name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
        if "." not in name
    }


MESSAGES: dict[str, Any] = _classes()
"""The class of each message of the first level by its name."""


def parse(name: str, content: bytes) -> Any:
    """Return the message of a request; raise InputError if its bytes are not one."""
    try:
        return MESSAGES[name].FromString(content)
    except DecodeError:
        raise not_a_message(name) from None


def not_a_message(name: str) -> InputError:
    """Return the error of bytes that are not a message."""
    return InputError(
        f"Expected a message {_PACKAGE}.{name}, got bytes that are not one.",
        "Generate the client from the definition of the Open Inference Protocol.",
    )


def write_message(name: str, /, **fields: object) -> bytes:
    """Return the bytes of a message."""
    content: bytes = MESSAGES[name](**fields).SerializeToString()
    return content
