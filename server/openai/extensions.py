"""Parameters of both APIs beyond OpenAI's, under vLLM's names: for the prompt, the sampling and the contents of the
answer."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from jaxinfer.request import MAX_BAD_WORD, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS, RequestError
from server.openai.strict import StrictModel, UnicodeText, describe

MAX_INT = 2**31 - 1
SAMPLING_FIELDS = (  # of the same names in `SamplingParams`
    *("allowed_token_ids", "bad_words", "logprob_token_ids", "skip_special_tokens", "include_stop_str_in_output"),
    "truncate_prompt_tokens",
)


class Extensions(StrictModel):
    stream: bool | None = None
    allowed_token_ids: list[int] | None = describe(minItems=1, maxItems=MAX_LOGIT_BIAS, description="no other token is sampled")
    bad_words: Annotated[list[UnicodeText], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = describe(
        maxItems=MAX_BAD_WORDS,
        items={"type": "string", "maxLength": MAX_BAD_WORD, "pattern": "\\S"},
        description="words that no answer holds",
    )
    logprob_token_ids: list[int] | None = describe(
        maxItems=MAX_TOP_LOGPROBS,
        description="with logprobs: each step's are of these tokens, beside the sampled one's, not of the likeliest",
    )
    prompt_logprobs: int | None = describe(
        minimum=0,
        maximum=MAX_TOP_LOGPROBS,
        description="log-probabilities of the prompt's tokens, and of so many likeliest; not in a stream",
    )
    skip_special_tokens: bool | None = describe(description="leave special tokens out of the text; true by default")
    include_stop_str_in_output: bool | None = describe(description="the text ends with the stop string")
    truncate_prompt_tokens: int | None = describe(
        **{"minimum": -1, "maximum": MAX_INT, "not": {"const": 0}}, description="keep the prompt's last tokens, that many; -1: what fits"
    )
    return_token_ids: bool | None = describe(description="the answer has its token ids, and the prompt's")
    return_tokens_as_token_ids: bool | None = describe(description="log-probabilities name tokens as 'token_id:5'")

    @model_validator(mode="after")
    def _check_extensions(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs is given with stream: they come with whole answers only, leave one of them out", "prompt_logprobs"
            )
        logprobs = getattr(self, "logprobs", None)
        has_logprobs = logprobs is not None and logprobs is not False
        if self.logprob_token_ids is not None and not has_logprobs:
            raise RequestError("logprob_token_ids is given without logprobs: ask for logprobs as well", "logprob_token_ids")
        if self.logprob_token_ids == []:
            raise RequestError("logprob_token_ids is empty: give at least one token id, or leave it out", "logprob_token_ids")
        return self
