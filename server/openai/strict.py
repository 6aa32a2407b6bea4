"""The base of every request's model: no conversions, and errors about one field each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, ValidationInfo, model_validator

from jaxinfer.request import RequestError
from server.openai.parameter_policy import ParameterPolicy, closest_known_name, not_implemented

MAX_NAMES = 256  # in an object that a request's model reads; models have some fifty


def describe(**keywords: Any) -> Any:
    """An optional field with its range in the OpenAPI page. Null means the same as leaving it out, as in OpenAI's
    API."""
    return Field(default=None, json_schema_extra=keywords)


def _check_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise ValueError(f"character {error.start} is half a surrogate pair: send the whole pair") from None
    return text


UnicodeText = Annotated[str, AfterValidator(_check_unicode)]
NonEmpty = Annotated[UnicodeText, Field(min_length=1)]


def one_of(what: str, **tags: str) -> Discriminator:
    """Chooses a union's member by the value's type (and, for lists, the first element's), so that an error is about one
    member."""

    def tag(value: Any) -> str | None:
        kind = type(value).__name__
        if isinstance(value, list) and value:
            kind = f"list_{type(value[0]).__name__}"
        return tags.get(kind)

    return Discriminator(tag, custom_error_type="value_type", custom_error_message=f"it must be {what}")


class StrictModel(BaseModel):
    """A JSON object without conversions (a number isn't read from a string). `ParameterPolicy` decides about unknown
    names: without one they are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # The position of such an object in a body; empty for the body itself.
    place: ClassVar[str] = ""
    # Parameters that would change the answer and are not implemented: refused by name, unless null or one of the
    # neutral values.
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    # Parameters that can't change the answer: refused like those where parameters are read strictly, else ignored like
    # any unknown name.
    unsupported_if_strict: ClassVar[dict[str, tuple[Any, ...]]] = {}
    # Fields that are accepted and have no effect, whatever their value.
    without_effect: ClassVar[frozenset[str]] = frozenset()

    _policy: ParameterPolicy = PrivateAttr(default_factory=ParameterPolicy)

    @property
    def policy(self) -> ParameterPolicy:
        """The policy it was read with; names that prove later to have no effect are recorded there. A policy of its own
        for a lone body."""
        return self._policy

    def read_with(self, policy: ParameterPolicy) -> None:
        """Set `policy`."""
        self._policy = policy

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_NAMES:
            raise RequestError(f"an object with {len(data)} keys was sent: at most {MAX_NAMES}", None, "invalid_value")
        policy = info.context if isinstance(info.context, ParameterPolicy) else ParameterPolicy()
        kept = _read_names(cls, data, policy)
        if policy.refusals and policy is not info.context:  # nobody else will report them
            raise policy.refusals[0]
        return kept


def _read_names(model: type[StrictModel], data: Mapping[str, Any], policy: ParameterPolicy) -> dict[str, Any]:
    """An object's values that its model is to check. Raises `RequestError` for names that would change the answer;
    those of the outermost object are recorded as refusals instead, so that its other faults are reported too."""
    kept: dict[str, Any] = {}
    missing: list[str] = []
    misspelt: list[tuple[str, str]] = []
    refused = model.unsupported | (model.unsupported_if_strict if policy.is_strict else {})
    for name, value in data.items():
        if (known := model.model_fields.get(name)) is not None:
            if value is not None or known.is_required() or policy.is_strict:
                kept[name] = value
            if name in model.without_effect and value is not None:
                policy.ignore(model.place, name)
        elif name in refused:
            if value is not None and value not in refused[name]:
                missing.append(name)
        elif policy.is_strict:
            kept[name] = value  # an error of pydantic's
        elif value is None:
            pass  # as if it were left out
        elif (near := closest_known_name(name, [*model.model_fields, *refused], policy)) is not None:
            misspelt.append((name, near))
        else:
            policy.ignore(model.place, name)
    problems = [] if not missing else [not_implemented(missing)]
    problems += [RequestError(f"unknown parameter: {name!r}; did you mean {near!r}?", name, "unknown_parameter") for name, near in misspelt]
    if problems and model.place:
        raise RequestError("; ".join(map(str, problems)), problems[0].param, problems[0].code)
    policy.refusals += problems
    return kept
