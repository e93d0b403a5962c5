"""``POST /v1/decisions`` of OpenAI, where the outputs of a model are its questions.

A model cannot read a question: an output answers the one question that it was trained for. A
question must therefore name an output, or have exactly the labels of one.

https://github.com/openai/openai-python (types/decision.py, types/decision_create_params.py)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, params
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, TypeAdapter

from aftexport.bundle.manifest import Manifest
from aftexport.heads import BinaryClassification, Head, SingleLabelClassification
from aftserve.api.adapters.adapter import (
    WITH_LABELS,
    Adapter,
    OpenAIError,
    document_of,
    error_body,
    is_document,
    validated,
)
from aftserve.api.document_answers import (
    DeadlineSeconds,
    answer_documents,
    check_documents,
    deadline_of,
)
from aftserve.api.error_responses import responses
from aftserve.api.model_choice import read_and_answer, requested
from aftserve.api.request_body import (
    COMPONENTS,
    TEXT_SCHEMA,
    Schema,
    any_of,
    body_schema,
    document_schemas,
    name_schema,
    put_body,
    read_json,
)
from aftserve.model.classifier import Classifier
from aftserve.model.documents import DocumentAnswer
from aftserve.model.wanted import AnswerOptions
from aftserve.serving.repository import ModelRepository
from aftserve.types import Document

MAX_QUESTIONS = 400
"""Maximum number of questions in a request."""
IGNORED_INSTRUCTIONS = "Ignored: an output answers its own question."
"""Description of the field that has the text of a question."""
_EXCLUSIVE = (SingleLabelClassification, BinaryClassification)


@dataclass(frozen=True)
class Labelled:
    """A question for one of several labels, and the output that answers it."""

    head: str
    labels: tuple[str, ...]

    def label(self, answer: DocumentAnswer) -> str:
        """Return the label of an answer."""
        label: str = answer.of_head(self.head).label
        return label

    def probabilities(self, answer: DocumentAnswer) -> dict[str, float]:
        """Return the probability of each label, as /infer has it."""
        scores = answer.of_head(self.head).scores
        return {label: scores[label] for label in self.labels}

    def confidence(self, answer: DocumentAnswer) -> float:
        """Return the probability of the answer's label, calibrated if the bundle can."""
        content = answer.of_head(self.head)
        confidence: float = (content.calibrated or content.scores)[content.label]
        return confidence

    def mean_level(self, answer: DocumentAnswer) -> float:
        """Return the mean number of the labels, which count from 0."""
        return sum(i * p for i, p in enumerate(self.probabilities(answer).values()))


@dataclass(frozen=True)
class Statement:
    """A question whether a label holds, and the output with the label."""

    head: str
    label: str

    def probability(self, answer: DocumentAnswer) -> float:
        """Return the probability of the label, as /infer has it."""
        probability: float = answer.of_head(self.head).scores[self.label]
        return probability


class Outputs:
    """The outputs of a model, to find those that answer the questions of a request."""

    def __init__(self, heads: Mapping[str, Head]) -> None:
        self._heads = heads
        self._labels = {
            name: frozenset(head.names)
            for name, head in heads.items()
            if isinstance(head, _EXCLUSIVE)
        }

    def of_labels(self, name: str | None, labels: Sequence[object]) -> list[Labelled]:
        """Return the outputs with these labels in any order; an output of this name has to fit."""
        texts = [label for label in labels if isinstance(label, str)]
        asked = frozenset(texts)
        if not len(asked) == len(texts) == len(labels):
            return []
        return [
            Labelled(output, tuple(texts))
            for output, own in self._labels.items()
            if own == asked and (name not in self._heads or output == name)
        ]

    def of_statement(self, name: str | None) -> list[Statement]:
        """Return the labels that ``LABEL``, ``OUTPUT:LABEL`` or an output of two labels names."""
        if name is None:
            return []
        if isinstance(head := self._heads.get(name), BinaryClassification):
            return [Statement(name, head.names[1])]
        return self._statements.get(name, [])

    @cached_property
    def _statements(self) -> dict[str, list[Statement]]:
        found = dict[str, list[Statement]]()
        for output, head in self._heads.items():
            for label in head.names if isinstance(head, WITH_LABELS) else ():
                for name in (label, f"{output}:{label}"):
                    found.setdefault(name, []).append(Statement(output, label))
        return found


PATH = "/v1/decisions"
Instructions = Annotated[str | list[dict[str, Any]], Field(description=IGNORED_INSTRUCTIONS)]
Name = Annotated[str | None, Field(description="Name of an output, or of a label.")]


class InputText(BaseModel):
    """A text."""

    type: Literal["input_text"]
    text: str = Field(min_length=1)


class InputMessage(BaseModel):
    """A message with one text."""

    role: Literal["user"]
    type: Literal["message"] = "message"
    content: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[InputText], Field(min_length=1, max_length=1)]
    )


class PredicateQuestion(BaseModel):
    """A question whether a label holds."""

    type: Literal["predicate"]
    instructions: Instructions
    name: Name = None


class Choice(BaseModel):
    """A label."""

    value: StrictStr | StrictBool
    description: str | None = None


class ChoiceQuestion(BaseModel):
    """A question for one of the labels of an output."""

    type: Literal["choice"]
    instructions: Instructions
    choices: list[Choice] = Field(min_length=2, max_length=255, fail_fast=True)
    name: Name = None


class Level(BaseModel):
    """A label, whose number is its place in the list."""

    label: str
    description: str | None = None


class ScoreQuestion(BaseModel):
    """A question for the mean of the labels of an output, as numbers from 0."""

    type: Literal["score"]
    instructions: Instructions
    levels: list[Level] = Field(min_length=2, max_length=255, fail_fast=True)
    name: Name = None


AnyQuestion = Annotated[
    PredicateQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")
]


class DecisionRequest(BaseModel):
    """A document, and questions about it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = Field(description="Name of the model.")
    input: Any = Field(description="A text, one message with a text, or token ids.")
    questions: list[AnyQuestion] = Field(min_length=1, max_length=MAX_QUESTIONS, fail_fast=True)
    prompt_cache_key: str | None = Field(None, description="Ignored.")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="Ignored.")
    safety_identifier: str | None = Field(None, description="Ignored.")


class PredicateAnswer(BaseModel):
    """The probability of a label."""

    type: Literal["predicate"] = "predicate"
    name: str | None
    probability: float


class ChoiceProbability(BaseModel):
    """The probability of a label."""

    value: str
    probability: float


class ChoiceAnswer(BaseModel):
    """The label of an output, and the probability of each."""

    type: Literal["choice"] = "choice"
    name: str | None
    choice: str
    confidence: float
    probabilities: list[ChoiceProbability]


class LevelProbability(BaseModel):
    """The probability of a label, and its number."""

    label: str
    value: int
    probability: float


class ScoreAnswer(BaseModel):
    """The mean of the labels as numbers, and the probability of each."""

    type: Literal["score"] = "score"
    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]


class Refusal(BaseModel):
    """A question that no output answers."""

    type: Literal["refusal"] = "refusal"
    name: str | None


class InputTokensDetails(BaseModel):
    """No token is cached."""

    cache_write_tokens: Literal[0] = 0
    cached_tokens: Literal[0] = 0


class OutputTokensDetails(BaseModel):
    """No token is written."""

    reasoning_tokens: Literal[0] = 0


class DecisionUsage(BaseModel):
    """The number of tokens that the model saw; 0 if no question is answered."""

    input_tokens: int
    input_tokens_details: InputTokensDetails = InputTokensDetails()
    output_tokens: Literal[0] = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class Decision(BaseModel):
    """The answers, in the order of the questions."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer | Refusal]
    usage: DecisionUsage


def create(models: ModelRepository, guards: Sequence[params.Depends]) -> Adapter:
    """Build the endpoint."""
    router = APIRouter(dependencies=guards, tags=["OpenAI"])

    @router.post(
        PATH,
        responses=responses(OpenAIError),
        openapi_extra=body_schema(DecisionRequest),
    )
    async def decide(request: Request, deadline_seconds: DeadlineSeconds = None) -> Decision:
        """Answer questions about one document. One that no output answers is refused."""
        models.check_open()
        body = await read_json(request, DecisionRequest, max_entries={})
        service = await requested(request, body.model)
        service.check_open()
        document = _document(body.input)
        deadline = deadline_of(request, deadline_seconds, service.settings.deadline_seconds)

        def read(manifest: Manifest) -> list[Labelled | Statement | None]:
            outputs = Outputs(manifest.heads)
            return [_find(question, outputs) for question in body.questions]

        async def answer(found: Sequence[Labelled | Statement | None]) -> list[DocumentAnswer]:
            names = list(dict.fromkeys(one.head for one in found if one is not None))
            if not names:
                await check_documents(request, service, [document], deadline)
                return []
            options = AnswerOptions(outputs=names)
            return await answer_documents(request, service, [document], deadline, options=options)

        found, answers = await read_and_answer(service, read, answer)
        tokens = sum(answer.result.tokens_used for answer in answers)
        asked = zip(body.questions, found, strict=True)
        return Decision(
            model=body.model,
            answers=[_answer(question, one, answers) for question, one in asked],
            usage=DecisionUsage(input_tokens=tokens, total_tokens=tokens),
        )

    def describe(document: Schema, classifier: Classifier | None, names: Sequence[str]) -> None:
        forms = document_schemas(classifier)
        message = {"$ref": f"{COMPONENTS}InputMessage"}
        if TEXT_SCHEMA in forms:
            forms.append({"type": "array", "items": message, "minItems": 1, "maxItems": 1})
        put_body(document, InputMessage, {})
        put_body(document, DecisionRequest, {"input": any_of(forms), "model": name_schema(names)})

    return Adapter(router, error_body, describe)


_MESSAGES = TypeAdapter(Annotated[list[InputMessage], Field(min_length=1, max_length=1)])


def _document(given: Any) -> Document:
    """Return the document of the field ``input``."""
    if is_document(given) or not isinstance(given, list):
        return document_of(given, ("input",))
    (message,) = validated(_MESSAGES, given[:2], ("input",))
    content = message.content
    return content if isinstance(content, str) else content[0].text


def _find(question: AnyQuestion, outputs: Outputs) -> Labelled | Statement | None:
    """Return the output that answers a question; None without exactly one such output."""
    found: Sequence[Labelled | Statement]
    match question:
        case PredicateQuestion():
            found = outputs.of_statement(question.name)
        case ChoiceQuestion():
            found = outputs.of_labels(question.name, [one.value for one in question.choices])
        case _:
            found = outputs.of_labels(question.name, [one.label for one in question.levels])
    return found[0] if len(found) == 1 else None


def _answer(
    question: AnyQuestion, found: Labelled | Statement | None, answers: Sequence[DocumentAnswer]
) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer | Refusal:
    name = question.name
    if found is None:
        return Refusal(name=name)
    (answer,) = answers
    if isinstance(found, Statement):
        return PredicateAnswer(name=name, probability=found.probability(answer))
    rows, confidence = found.probabilities(answer).items(), found.confidence(answer)
    if isinstance(question, ChoiceQuestion):
        return ChoiceAnswer(
            name=name,
            choice=found.label(answer),
            confidence=confidence,
            probabilities=[ChoiceProbability(value=one, probability=p) for one, p in rows],
        )
    levels = [
        LevelProbability(label=label, value=value, probability=probability)
        for value, (label, probability) in enumerate(rows)
    ]
    score = found.mean_level(answer)
    return ScoreAnswer(name=name, score=score, confidence=confidence, probabilities=levels)
