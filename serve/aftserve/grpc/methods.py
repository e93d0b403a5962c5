"""The methods of the protocol, and the conversion of their messages."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import grpc

from aftexport.bundle.manifest import Manifest
from aftexport.errors import InputError
from aftexport.extra_inputs import MAX_INPUTS
from aftserve.api.model_choice import read_and_answer
from aftserve.api.open_inference import messages, tensors
from aftserve.api.open_inference.columns import OutputNames, columns_of
from aftserve.api.open_inference.descriptions import (
    VERSION,
    check_version,
    describe_model,
    describe_server,
)
from aftserve.api.open_inference.repository_routes import (
    EXTENSION,
    check_load,
    check_unload,
    index_of,
)
from aftserve.api.open_inference.schemas import Datatype, ModelMetadata
from aftserve.errors import DocumentTooLongError, NotFoundError
from aftserve.grpc.call import Call, Caller, Method, Rules
from aftserve.grpc.infer_request import (
    Contents,
    InferRequest,
    expanded_size,
    read_numbers,
    split_request,
)
from aftserve.grpc.wire_types import MESSAGES, SERVICE, parse, write_message
from aftserve.model.documents import DocumentAnswer
from aftserve.serving.repository import ModelRepository
from aftserve.serving.service import Service

_RULES = {
    "ServerLive": Rules("open", is_read=False, is_probe=True),
    "ServerReady": Rules("open", is_read=False, is_probe=True),
    "ServerMetadata": Rules("open", is_read=False),
    "ModelReady": Rules(is_probe=True),
    "ModelInfer": Rules(is_large=True),
    "RepositoryModelLoad": Rules("admin"),
    "RepositoryModelUnload": Rules("admin"),
}
"""The rules for calls, whose rights are those of HTTP; the other methods have the usual ones."""
_INLINE_BYTES = 1 << 12
"""Maximum size of a message that is read in the event loop, in about a millisecond."""
_CONTENTS: dict[Datatype, str] = {
    "BOOL": "bool_contents",
    "BYTES": "bytes_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
}
"""The field of a tensor's values that are not raw bytes, by its datatype."""
_MAX_TENSORS = {"inputs": 2 + MAX_INPUTS, "outputs": 256}
_MAX_AXES = 4
"""More axes than any input has; further ones are not read."""


class Methods:
    """The methods."""

    def __init__(self, models: ModelRepository) -> None:
        self._models = models
        self._names = OutputNames()
        # One at a time: several would take all turns of the loop. A call that is cancelled leaves
        # its work to the thread, which a lock would give back.
        self._splitting = ThreadPoolExecutor(1, "grpc-messages")

    def handler(self, caller: Caller) -> grpc.GenericRpcHandler:
        """Return the handler of the service, whose calls ``caller`` runs."""
        methods: dict[str, Method] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": partial(self._model_infer, caller.max_message_bytes),
            **_repository_methods(self._models, has_admins=caller.has_keys),
        }
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                name: caller.handler(f"/{SERVICE}/{name}", method, _RULES.get(name, Rules()))
                for name, method in methods.items()
            },
        )

    async def _server_live(self, content: bytes, call: Call) -> bytes:
        return write_message("ServerLiveResponse", live=True)

    async def _server_ready(self, content: bytes, call: Call) -> bytes:
        return write_message("ServerReadyResponse", ready=self._models.ready)

    async def _server_metadata(self, content: bytes, call: Call) -> bytes:
        described = describe_server(extensions=[EXTENSION])
        return write_message("ServerMetadataResponse", **described.model_dump())

    async def _model_ready(self, content: bytes, call: Call) -> bytes:
        request = parse("ModelReadyRequest", content)
        try:
            ready = self._named(call, request.name, request.version).health.ready
        except NotFoundError:
            ready = False  # as Triton answers for a model that is unloaded or that it does not know
        return write_message("ModelReadyResponse", ready=ready)

    async def _model_metadata(self, content: bytes, call: Call) -> bytes:
        request = parse("ModelMetadataRequest", content)
        return _write_metadata(describe_model(self._named(call, request.name, request.version)))

    async def _model_infer(self, max_bytes: int, content: bytes, call: Call) -> bytes:
        self._models.check_open()
        request, parts = await self._split(max_bytes, content, call)
        named = request.message
        service = self._named(call, named.model_name, named.model_version)
        service.check_open()

        def read(manifest: Manifest) -> messages.Message:
            return read_request(
                request,
                parts,
                max_documents=service.settings.max_documents,
                manifest=manifest,
                outputs=self._names.of(manifest),
            )

        async def answer(message: messages.Message) -> list[DocumentAnswer]:
            return await service.classify(
                message.documents,
                call.deadline,
                message.given,
                options=message.options,
                inline=message.inline,  # a response is one message, as JSON
            )

        message, answers = await read_and_answer(service, read, answer)
        total = sum(answer.result.tokens_total for answer in answers)
        call.fields.update(documents=len(answers), tokens=total)
        name = service.name
        responding = partial(_write_response, message, answers, name=name, version=VERSION)
        if not answers[0].tokens.results:
            return responding()
        # In a thread: the outputs of many tokens take long.
        return await asyncio.to_thread(responding)

    async def _split(
        self, max_bytes: int, content: bytes, call: Call
    ) -> tuple[InferRequest, Sequence[bytes | memoryview]]:
        """Return a request and the bytes of its inputs; hold no more of the buffer than these."""

        def work() -> tuple[InferRequest, Sequence[bytes | memoryview]]:
            request = split_request(content)
            return request, input_bytes(request, max_bytes)

        if len(content) <= _INLINE_BYTES:
            request, parts = work()
        else:
            loop = asyncio.get_running_loop()
            request, parts = await loop.run_in_executor(self._splitting, work)
        call.keep(min(max_bytes, max(len(content), sum(map(len, parts)))))
        return request, parts

    def _named(self, call: Call, name: str, version: str) -> Service:
        service = self._models.named(name)
        call.model = service.name
        call.releases.append(service.holders.add())
        check_version(name, version or VERSION)
        return service


def _repository_methods(models: ModelRepository, *, has_admins: bool) -> Mapping[str, Method]:
    """Return the methods by name."""
    # has_admins: whether the server loads and unloads models

    async def index(content: bytes, call: Call) -> bytes:
        request = _parse("RepositoryIndexRequest", content)
        found = index_of(await models.index(), ready=request.ready)
        return write_message("RepositoryIndexResponse", models=[one.model_dump() for one in found])

    async def load(content: bytes, call: Call) -> bytes:
        request = _parse("RepositoryModelLoadRequest", content)
        check_load(_parameters(request))
        await models.load(request.model_name)
        return write_message("RepositoryModelLoadResponse")

    async def unload(content: bytes, call: Call) -> bytes:
        request = _parse("RepositoryModelUnloadRequest", content)
        check_unload(_parameters(request))
        await models.unload(request.model_name)
        return write_message("RepositoryModelUnloadResponse")

    admin = {"RepositoryModelLoad": load, "RepositoryModelUnload": unload} if has_admins else {}
    return {"RepositoryIndex": index, **admin}


def _parse(name: str, content: bytes) -> Any:
    """Return the message of a request; raise InputError if it names a repository."""
    request = parse(name, content)
    if request.repository_name:
        raise InputError(
            f"Expected no repository_name, got {request.repository_name[:100]!r}.",
            "Leave it empty: models have names of their own in the whole server.",
        )
    return request


def _parameters(request: Any) -> dict[str, object]:
    kinds = {name: one.WhichOneof("parameter_choice") for name, one in request.parameters.items()}
    return {name: kind and getattr(request.parameters[name], kind) for name, kind in kinds.items()}


def read_request(
    request: InferRequest,
    parts: Sequence[bytes | memoryview],  # the bytes of its inputs, from input_bytes
    *,
    max_documents: int,
    manifest: Manifest,
    outputs: Sequence[str],
) -> messages.Message:
    """Check a request by the rules of HTTP."""
    message = request.message
    inputs = [
        {
            "name": one.name,
            "shape": list(one.shape[:_MAX_AXES]),
            "datatype": one.datatype,
            "parameters": {"binary_data_size": len(part)},
        }
        for one, part in zip(message.inputs, parts, strict=True)
    ]
    wanted = [
        {"name": one.name, "parameters": _classification(one.parameters)} for one in message.outputs
    ]
    content = {"id": message.id or None, "inputs": inputs, "outputs": wanted or None}
    binary = parts[0] if len(parts) == 1 else b"".join(parts)
    return messages.parse(
        content,
        memoryview(binary),
        max_documents=max_documents,
        manifest=manifest,
        outputs=outputs,
    )


def input_bytes(request: InferRequest, max_bytes: int) -> Sequence[bytes | memoryview]:
    """Return the bytes of each input.

    Raises:
        InputError: if there are too many tensors, or an input has no or other values.
        DocumentTooLongError: if the values are too large.
    """
    # max_bytes: of all of them
    message, raw = request.message, request.raw
    for name, most in _MAX_TENSORS.items():  # before the work for each
        if (count := len(getattr(message, name))) > most:
            raise InputError(f"Expected at most {most} {name}, got {count}.", f"Send fewer {name}.")
    inputs = list(zip(message.inputs, request.contents, strict=True))
    if not raw:
        sizes = (_contents_size(one, contents) for one, contents in inputs)
        if (size := sum(sizes)) > max_bytes:
            raise DocumentTooLongError(
                f"The integers of all inputs must have at most {max_bytes} bytes as INT64, got "
                f"{size}.",
                "Send several smaller requests.",
            )
        return [_contents_bytes(one, contents) for one, contents in inputs]
    if len(raw) != len(inputs):
        raise InputError(
            f"Expected raw_input_contents of {len(inputs)} inputs, got {len(raw)}.",
            "Send the bytes of every input, in the order of inputs.",
        )
    for one, contents in inputs:
        if contents:
            raise InputError(
                f"Expected raw_input_contents or contents, got both for {one.name[:100]!r}.",
                "Send raw_input_contents only.",
            )
    return raw


def _contents_size(tensor: Any, contents: Contents) -> int:
    """Return the number of bytes of an input's numbers; texts take no more than they did."""
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        return 0  # the datatype is refused with the rest of the request
    if contents and [*contents] != [field]:
        raise InputError(
            f"Expected {field} of the {tensor.datatype} input {tensor.name[:100]!r}, got "
            f"{', '.join(contents)}.",
            f"Send the values in {field}, or all inputs in raw_input_contents.",
        )
    values = contents.get(field, ())
    if tensor.datatype == "BYTES":
        return 0
    return expanded_size(values, tensors.dtype_of(tensor.datatype))


def _contents_bytes(tensor: Any, contents: Contents) -> bytes:
    """Return the values of an input as raw bytes."""
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        return b""
    values = contents.get(field, ())
    if tensor.datatype == "BYTES":
        sized = ((len(value).to_bytes(4, "little"), value) for value in values)
        return b"".join(chain.from_iterable(sized))
    return read_numbers(values, tensors.dtype_of(tensor.datatype)).tobytes()


def _classification(given: Any) -> dict[str, Any]:
    """Return the one parameter of an output that matters: those for binary tensors are of JSON."""
    name = "classification"
    kind = given[name].WhichOneof("parameter_choice") if name in given else None
    return {} if kind is None else {name: getattr(given[name], kind)}


def _write_response(
    message: messages.Message, answers: Sequence[DocumentAnswer], *, name: str, version: str
) -> bytes:
    """Return the bytes of a ModelInferResponse, whose outputs are raw bytes."""
    request = message.request
    wanted = [output.name for output in request.outputs] if request.outputs else None
    response = MESSAGES["ModelInferResponse"](
        model_name=name, model_version=version, id=request.id or ""
    )
    for parameter, value in messages.parameters_of(answers).items():
        response.parameters[parameter].string_param = value
    for output, column in columns_of(answers, wanted).items():
        _, parts = column.content()
        response.outputs.add(name=output, datatype=column.datatype, shape=column.shape)
        response.raw_output_contents.append(b"".join(parts))
    content: bytes = response.SerializeToString()
    return content


def _write_metadata(metadata: ModelMetadata) -> bytes:
    """Return the bytes of a ModelMetadataResponse."""
    response = MESSAGES["ModelMetadataResponse"](
        name=metadata.name, versions=metadata.versions, platform=metadata.platform
    )
    for field in ("inputs", "outputs"):
        for one in getattr(metadata, field):
            getattr(response, field).add(name=one.name, datatype=one.datatype, shape=one.shape)
    content: bytes = response.SerializeToString()
    return content
