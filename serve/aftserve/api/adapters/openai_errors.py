"""Errors in the format of OpenAI."""

from typing import Any, Literal

from pydantic import BaseModel


class OpenAIErrorInfo(BaseModel):
    """An error."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: None = None
    code: None = None


class OpenAIError(BaseModel):
    """The problem of a request, and its remedy."""

    error: OpenAIErrorInfo


def error_body(error: Exception, status: int, message: str) -> dict[str, Any]:
    """Return an error in the format of OpenAI."""
    kind: Any = "server_error" if status >= 500 else "invalid_request_error"
    info = OpenAIErrorInfo(message=message, type="rate_limit_error" if status == 429 else kind)
    return OpenAIError(error=info).model_dump()
