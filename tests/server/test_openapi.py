"""Schemathesis asks the app whatever its own OpenAPI page allows, and what it forbids."""

import re
import tempfile
from pathlib import Path

import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS

from server.batches.batch_store import BatchStore
from server.config import ServerConfig
from server.openai.app import create_app
from tests.server.fakes import FakeBackend, byte_tokenizer

KEY = "a-key"
FOLDER = tempfile.TemporaryDirectory()


def make_app() -> FastAPI:
    tokenizer = byte_tokenizer()
    config = ServerConfig(served_model_name=("tiny",), served_embedding_name=("tiny",), api_keys=(KEY,))
    return create_app(FakeBackend(tokenizer), tokenizer, config, store=BatchStore(Path(FOLDER.name)))


schema = schemathesis.openapi.from_asgi("/openapi.json", make_app())
EXAMPLES = settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


# What a schema can't say: fields that depend on one another, and what the model, its context and the folder hold.
DEPENDENT = {"priority", "top_logprobs", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "best_of"} | {
    *("logprob_token_ids", "prompt_logprobs", "continue_final_message", "truncation_side", "tool_choice"),
    *("response_format", "response_format.json_schema", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
}
OF_THE_MODEL = {"truncate_prompt_tokens"} | {
    "logit_bias",
    "stop_token_ids",
    "allowed_token_ids",
    "prompt",
    "messages",
    "tools",
    "chat_template_kwargs",
    "input",
    "dimensions",
}
OF_CALLS = re.compile(r"messages\[\d+\]\.(content|tool_calls\[\d+\]\.function\.arguments)")  # text or calls; JSON as text
OF_THE_FOLDER = {"input_file_id"}


@schema.parametrize()
@EXAMPLES
def test_the_app_does_what_its_page_says(case):
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "tiny"  # a model of another name is 404 whatever else is asked
    response = case.call(headers={"Authorization": f"Bearer {KEY}"})
    error = response.json()["error"] if response.status_code == 400 else {"param": None, "code": None}
    param = error["param"]
    is_dependent = param in DEPENDENT | OF_THE_MODEL | OF_THE_FOLDER or OF_CALLS.fullmatch(param or "") is not None
    is_dependent |= error["code"] == "unsupported_parameter"  # a name of other servers' parameters, which no schema here has
    leaves_no_trace = any(value in ([], {}) for value in (case.query or {}).values())  # not in the URL: what was to be wrong never arrives
    excluded = [name for name, is_so in (("positive_data_acceptance", is_dependent), ("negative_data_rejection", leaves_no_trace)) if is_so]
    case.validate_response(response, excluded_checks=CHECKS.get_by_names(excluded))
