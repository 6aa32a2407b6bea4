"""What every request's model is made of: nothing converted, errors that speak of one field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, ValidationInfo, model_validator

from jaxinfer.request import RequestError
from server.openai.reading import Reading, meant, not_implemented

MAX_NAMES = 256  # in an object that a request's model reads; it has some fifty


def documented(**keywords: Any) -> Any:
    """An optional field with its range in the OpenAPI page. Null means the same as leaving it out, as OpenAI has it."""
    return Field(default=None, json_schema_extra=keywords)


def _check_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a character outside the basic plane
        raise ValueError(f"character {error.start} is half a surrogate pair: send the whole pair") from None
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]
NonEmpty = Annotated[Text, Field(min_length=1)]


def one_of(what: str, **tags: str) -> Discriminator:
    """Chooses a union's member by the value's type (and, for lists, the first element's), so that an error speaks of one member."""

    def tag(value: Any) -> str | None:
        kind = type(value).__name__
        if isinstance(value, list) and value:
            kind = f"list_{type(value[0]).__name__}"
        return tags.get(kind)

    return Discriminator(tag, custom_error_type="value_type", custom_error_message=f"it must be {what}")


class StrictModel(BaseModel):
    """A JSON object: nothing is converted (a number isn't read from a string). What becomes of unknown names is `Reading`'s to say:
    without one they are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # Where such an object is in a body; empty for the body itself.
    place: ClassVar[str] = ""
    # What would change the answer and is not implemented: refused by name, unless null or one of the values that ask for nothing.
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    # What can't change the answer: refused so where parameters are read strictly, else ignored as any unknown name is.
    unsupported_if_strict: ClassVar[dict[str, tuple[Any, ...]]] = {}
    # Fields that are accepted and do nothing, whatever they hold.
    without_effect: ClassVar[frozenset[str]] = frozenset()

    _reading: Reading = PrivateAttr(default_factory=Reading)

    @property
    def reading(self) -> Reading:
        """How it was read; what turns out later to have no effect is noted there. Its own for a body alone."""
        return self._reading

    def read_with(self, reading: Reading) -> None:
        """Set `reading`."""
        self._reading = reading

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_NAMES:
            raise RequestError(f"an object with {len(data)} keys was sent: at most {MAX_NAMES}", None, "invalid_value")
        reading = info.context if isinstance(info.context, Reading) else Reading()
        kept = _read_names(cls, data, reading)
        if reading.refusals and reading is not info.context:  # nobody is there to tell them
            raise reading.refusals[0]
        return kept


def _read_names(model: type[StrictModel], data: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """An object's values that its model is to check. Raises `RequestError` for names that would change the answer; those of the
    outermost object are noted as refusals instead, so that its other faults are told too."""
    kept: dict[str, Any] = {}
    missing: list[str] = []
    misspelt: list[tuple[str, str]] = []
    refused = model.unsupported | (model.unsupported_if_strict if reading.is_strict else {})
    for name, value in data.items():
        if (known := model.model_fields.get(name)) is not None:
            if value is not None or known.is_required() or reading.is_strict:
                kept[name] = value
            if name in model.without_effect and value is not None:
                reading.ignore(model.place, name)
        elif name in refused:
            if value is not None and value not in refused[name]:
                missing.append(name)
        elif reading.is_strict:
            kept[name] = value  # an error of pydantic's
        elif value is None:
            pass  # as if it were left out
        elif (near := meant(name, [*model.model_fields, *refused], reading)) is not None:
            misspelt.append((name, near))
        else:
            reading.ignore(model.place, name)
    problems = [] if not missing else [not_implemented(missing)]
    problems += [RequestError(f"unknown parameter: {name!r}; did you mean {near!r}?", name, "unknown_parameter") for name, near in misspelt]
    if problems and model.place:
        raise RequestError("; ".join(map(str, problems)), problems[0].param, problems[0].code)
    reading.refusals += problems
    return kept
