"""Endpoints that compare the server with PyTorch."""

from collections.abc import Sequence

from fastapi import APIRouter, Request, params

from aftserve.api.deadline import DeadlineSeconds, deadline_of, run_until_disconnect
from aftserve.api.error_responses import GUARDED, responses
from aftserve.api.model_choice import ChosenModel
from aftserve.api.openapi_body import body_schema
from aftserve.api.request_body import read_json
from aftserve.parity.schemas import ParityCheck, ParityReport
from aftserve.schemas import DocumentRequest, Problem


def create_router(guards: Sequence[params.Depends]) -> APIRouter:
    """Build the endpoints of parity.

    Args:
        guards: checks of a request.
    """
    problems = responses(Problem)
    unknown = {"model": Problem, "description": "The server has no PyTorch model."}
    router = APIRouter(
        dependencies=guards, responses={status: problems[status] for status in GUARDED}
    )

    @router.get("/parity", responses={404: problems[404]})
    async def report(service: ChosenModel) -> ParityReport:
        """The bundle's golden cases with PyTorch's outputs, as run when the server started."""
        return service.parity.report()

    @router.post(
        "/parity", responses={**problems, 404: unknown}, openapi_extra=body_schema(DocumentRequest)
    )
    async def compare(
        request: Request, service: ChosenModel, deadline_seconds: DeadlineSeconds = None
    ) -> ParityCheck:
        """Classify a document, and compare every output with PyTorch's."""
        service.check_open()
        max_tokens = service.model.classifier.max_tokens
        body = await read_json(request, DocumentRequest, max_entries={"input_ids": max_tokens})
        deadline = deadline_of(request, deadline_seconds, service.settings.deadline_seconds)
        work = service.compare(body.document, deadline, body.inputs or {})
        return await run_until_disconnect(work, request.receive, deadline)

    return router
