"""The base of every head's answer, and the kinds of its fields."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

Field = Literal[
    "name", "names", "numbers", "token_names", "token_numbers", "spans", "vector", "vectors"
]
"""The kind of a field of an answer. Code that shows answers of any head knows only these kinds:

- name: one of the head's names.
- names: some of the head's names.
- numbers: a number for each of the head's names.
- token_names: one of the head's names for each token.
- token_numbers: a number for each token.
- spans: runs of tokens, each with a name and a number.
- vector: one number for each logit.
- vectors: a vector for each token.
"""


class Span(BaseModel):
    """A run of tokens with one label.

    Attributes:
        label: the label, without the prefix of a scheme such as ``B-``.
        start_token, end_token: the index of its first token, and of the token after its last.
        score: the probability of the label, from 0 to 1.
        start, end: the index of its first character, and of the character after its last; None
            without a text.
        text: its characters; None without a text.
    """

    model_config = ConfigDict(frozen=True)

    label: str
    start_token: int
    end_token: int
    score: float
    start: int | None = None
    end: int | None = None
    text: str | None = None


Name = Annotated[str, "name"]
Names = Annotated[tuple[str, ...], "names"]
Numbers = Annotated[dict[str, float], "numbers"]
TokenNames = Annotated[tuple[str, ...], "token_names"]
TokenNumbers = Annotated[tuple[float, ...], "token_numbers"]
Spans = Annotated[tuple[Span, ...], "spans"]
Vector = Annotated[tuple[float, ...], "vector"]
Vectors = Annotated[tuple[tuple[float, ...], ...], "vectors"]


class Answer(BaseModel):
    """The answer of a head for one document; the base of each head's own answer.

    The type of every required field is one of ``Name``, ``Names`` and so on, which names its kind.
    Only the fields of a calibration are optional.
    """

    model_config = ConfigDict(frozen=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Check that every field of a new answer has a kind."""
        super().__pydantic_init_subclass__(**kwargs)
        cls.kinds()

    @classmethod
    def kinds(cls) -> dict[str, Field]:
        """Return the kind of each required field."""
        fields = cls.model_fields.items()
        return {name: cls._kind_of(name, field) for name, field in fields if field.is_required()}

    @classmethod
    def _kind_of(cls, name: str, field: FieldInfo) -> Field:
        kinds: list[Field] = [kind for kind in get_args(Field) if kind in field.metadata]
        if len(kinds) != 1:
            raise TypeError(
                f"{cls.__name__}.{name}: expected a type of aftexport.heads.answer, such as Name, "
                f"got {field.annotation}"
            )
        return kinds[0]
