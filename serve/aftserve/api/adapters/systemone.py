"""``POST /v1/systemone`` of TypeSafe, where the outputs of a model are its questions.

https://github.com/typesafe-ai/typesafe-sdk-python (_schemas/models.py)
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, params
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from aftexport.bundle.manifest import Manifest
from aftexport.errors import InputError
from aftserve.api.adapters.adapter import Adapter
from aftserve.api.adapters.documents import document_of
from aftserve.api.adapters.questions import (
    IGNORED_INSTRUCTIONS,
    MAX_QUESTIONS,
    Labelled,
    Outputs,
    Statement,
)
from aftserve.api.document_answers import DeadlineSeconds, answer_documents, deadline_of
from aftserve.api.document_schemas import (
    Schema,
    any_of,
    body_schema,
    document_schemas,
    name_schema,
    put_body,
)
from aftserve.api.error_responses import responses
from aftserve.api.model_choice import read_and_answer, requested
from aftserve.api.request_body import read_json
from aftserve.model.classifier import Classifier
from aftserve.model.results import DocumentAnswer
from aftserve.model.wanted import AnswerOptions
from aftserve.serving.repository import ModelRepository

PATH = "/v1/systemone"
Content = str | dict[str, Any] | list[Any] | None
Instructions = Annotated[Content, Field(description=IGNORED_INSTRUCTIONS)]


class NoulQuestion(BaseModel):
    """A question whether a label holds."""

    type: Literal["noul"]
    instructions: Instructions = None
    criteria: dict[str, Any] | None = None


class ChoiceQuestion(BaseModel):
    """A question for one of the labels of an output."""

    type: Literal["choice"]
    instructions: Instructions = None
    criteria: dict[str, Any] = Field(min_length=1, description="The labels of an output.")


class ScoreQuestion(BaseModel):
    """A question for the mean of the labels of an output, as numbers from 0."""

    type: Literal["score"]
    instructions: Instructions = None
    criteria: list[Any] = Field(min_length=1, description="The labels of an output, in any order.")


class BoxQuestion(BaseModel):
    """A question for a place in an image, which no output answers."""

    type: Literal["box"]
    instructions: Instructions = None


AnyQuestion = Annotated[
    NoulQuestion | ChoiceQuestion | ScoreQuestion | BoxQuestion, Field(discriminator="type")
]


def _limit_count(questions: Any) -> Any:
    """Refuse too many questions before each of them is checked."""
    if isinstance(questions, dict) and len(questions) > MAX_QUESTIONS:
        raise ValueError(f"expected at most {MAX_QUESTIONS} questions, got {len(questions)}")
    return questions


class SystemOneRequest(BaseModel):
    """A document, and questions about it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = Field(description="Name of the model.")
    state: Any = Field(description="The document: a text, or token ids.")
    questions: Annotated[
        dict[str, AnyQuestion],
        Field(
            min_length=1,
            max_length=MAX_QUESTIONS,
            description="Questions by name, which is that of an output or of a label.",
        ),
        BeforeValidator(_limit_count),
    ]
    assets: None = Field(None, description="The model takes no images.")


class NoulAnswer(BaseModel):
    """The probability of a label."""

    type: Literal["noul"] = "noul"
    noul: float


class ChoiceAnswer(BaseModel):
    """The label of an output, and the probability of each."""

    type: Literal["choice"] = "choice"
    choice: str
    confidence: float
    probabilities: dict[str, float]


class ScoreAnswer(BaseModel):
    """The mean of the labels as numbers, and the probability of each number."""

    type: Literal["score"] = "score"
    score: float
    confidence: float
    legend: dict[str, str]
    probabilities: dict[str, float]


class SystemOneUsage(BaseModel):
    """The number of tokens that the model saw."""

    input_tokens: int
    output_tokens: Literal[0] = 0


class SystemOneResponse(BaseModel):
    """The answers, by the names of the questions."""

    model: str
    answers: dict[str, NoulAnswer | ChoiceAnswer | ScoreAnswer]
    usage: SystemOneUsage


class InvalidValue(BaseModel):
    """A value of a body that is refused, such as a question that no output answers."""

    loc: list[str | int]
    msg: str
    type: str


class SystemOneProblem(BaseModel):
    """The problem of a request, and its remedy."""

    detail: str | list[InvalidValue]


def create(models: ModelRepository, guards: Sequence[params.Depends]) -> Adapter:
    """Build the endpoint."""
    router = APIRouter(dependencies=guards, tags=["TypeSafe"])

    @router.post(
        PATH,
        responses=responses(SystemOneProblem),
        openapi_extra=body_schema(SystemOneRequest),
    )
    async def system_one(
        request: Request, deadline_seconds: DeadlineSeconds = None
    ) -> SystemOneResponse:
        """Answer questions about one document. Each must have an output that answers it."""
        models.check_open()
        body = await read_json(request, SystemOneRequest, max_entries={})
        service = await requested(request, body.model)
        service.check_open()
        document = document_of(body.state, ("state",))
        deadline = deadline_of(request, deadline_seconds, service.settings.deadline_seconds)

        def read(manifest: Manifest) -> dict[str, Labelled | Statement]:
            return _find_all(body.questions, Outputs(manifest.heads))

        async def answer_all(found: Mapping[str, Labelled | Statement]) -> list[DocumentAnswer]:
            options = AnswerOptions(outputs=list(dict.fromkeys(one.head for one in found.values())))
            return await answer_documents(request, service, [document], deadline, options=options)

        found, (answer,) = await read_and_answer(service, read, answer_all)
        return SystemOneResponse(
            model=body.model,
            answers={n: _answer(body.questions[n], one, answer) for n, one in found.items()},
            usage=SystemOneUsage(input_tokens=answer.result.tokens_used),
        )

    def describe(document: Schema, classifier: Classifier | None, names: Sequence[str]) -> None:
        state = any_of(document_schemas(classifier))
        put_body(document, SystemOneRequest, {"state": state, "model": name_schema(names)})

    return Adapter(router, error_body, describe)


def _find_all(
    questions: Mapping[str, AnyQuestion], outputs: Outputs
) -> dict[str, Labelled | Statement]:
    """Find the outputs that answer questions.

    Raises:
        RequestValidationError: with each question that no output answers.
    """
    found, refused = dict[str, Labelled | Statement](), []
    for name, question in questions.items():
        try:
            found[name] = _find(name, question, outputs)
        except InputError as error:
            place = ("questions", name, question.type)
            refused.append({"loc": place, "msg": str(error), "type": "unanswerable_question"})
    if refused:
        raise RequestValidationError(refused)
    return found


def _find(name: str, question: AnyQuestion, outputs: Outputs) -> Labelled | Statement:
    found: Sequence[Labelled | Statement]
    match question:
        case NoulQuestion():
            found = outputs.of_statement(name)
            expected, known = "the name of one label", outputs.statements
            given = f"{len(found)} labels of this name"
        case ChoiceQuestion() | ScoreQuestion():
            found = outputs.of_labels(name, list(question.criteria))
            expected, known = "the labels of one output", outputs.choices
            given = f"{len(found)} outputs with these"
        case _:
            raise InputError("Expected a question for labels, got box.", "Leave it out.")
    if len(found) != 1:
        raise InputError(f"Expected {expected}, got {given}.", f"The model has {known}.")
    return found[0]


def _answer(
    question: AnyQuestion, found: Labelled | Statement, answer: DocumentAnswer
) -> NoulAnswer | ChoiceAnswer | ScoreAnswer:
    if isinstance(found, Statement):
        return NoulAnswer(noul=found.probability(answer))
    rows, confidence = found.probabilities(answer), found.confidence(answer)
    if isinstance(question, ChoiceQuestion):
        label = found.label(answer)
        return ChoiceAnswer(choice=label, confidence=confidence, probabilities=rows)
    return ScoreAnswer(
        score=found.mean_level(answer),
        confidence=confidence,
        legend={str(number): label for number, label in enumerate(rows)},
        probabilities={str(number): one for number, one in enumerate(rows.values())},
    )


def _place(loc: Sequence[str | int]) -> list[str | int]:
    """Return the place of a value in a request."""
    return [*loc] if loc[:1] and loc[0] in ("body", "header") else ["body", *loc]


def error_body(error: Exception, status: int, message: str) -> dict[str, Any]:
    """Return an error in the format of TypeSafe: a list of the values of an invalid body."""
    if not isinstance(error, RequestValidationError):
        return SystemOneProblem(detail=message).model_dump()
    values = [
        InvalidValue(loc=_place(one["loc"]), msg=one["msg"], type=one["type"])
        for one in error.errors()[:MAX_QUESTIONS]
    ]
    return SystemOneProblem(detail=values).model_dump()
