"""What every request's model is made of: no unknown names, nothing converted, errors that speak of one field."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, model_validator

from jaxinfer.request import RequestError


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
    """A JSON object: unknown names are refused, and nothing is converted (a number isn't read from a string)."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # What OpenAI's API has and this server doesn't: refused by name, unless null or one of the values that ask for nothing.
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, harmless in cls.unsupported.items():
            if data.get(name) is not None and data[name] not in harmless:
                raise RequestError(f"{name} is not supported by this server: leave it out", name, "unsupported_parameter")
        return {name: value for name, value in data.items() if name not in cls.unsupported}
