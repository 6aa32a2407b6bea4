"""An input file is read through before its batch begins: what is wrong with it, where, in OpenAI's codes."""

import json

import pytest

from server.batches.validation import MAX_ERRORS, MAX_LINES, LinePlace, check_input
from tests.server.batches.conftest import CHAT, TEXT, line

LIMIT = 500


@pytest.fixture
def checked(tmp_path):
    def checked(*lines, end="\n", limit=LIMIT):
        path = tmp_path / "in.jsonl"
        path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + end.encode())
        return path.read_bytes(), check_input(path, "/v1/completions", limit)

    return checked


@pytest.mark.parametrize("end", ["\n", "", "\n\n", "\r\n"])
def test_each_line_is_found_where_it_lies(checked, end):
    raw, found = checked(line("a"), "", line("é"), "  ", line("c"), end=end)
    assert found.errors == ()
    assert [place.number for place in found.lines] == [1, 3, 5]
    requests = [json.loads(raw[place.position : place.position + place.num_bytes]) for place in found.lines]
    assert [request["custom_id"] for request in requests] == ["a", "é", "c"]
    assert found.model == "tiny"


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        ("not JSON", "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        ("[]", "invalid_type", None),
        (json.dumps({"method": "POST", "url": "/v1/completions", "body": TEXT}), "missing_required_parameter", "custom_id"),
        (json.dumps({"custom_id": "x", "url": "/v1/completions", "body": TEXT}), "missing_required_parameter", "method"),
        (json.dumps({"custom_id": "x", "method": "POST", "url": "/v1/completions"}), "missing_required_parameter", "body"),
        (line("x", method="GET"), "invalid_value", "method"),
        (line(3), "invalid_type", "custom_id"),
        (line(""), "invalid_value", "custom_id"),
        (line("x", body="text"), "invalid_type", "body"),
        (line("x", "/v1/chat/completions", CHAT), "url_mismatch", "url"),
        (line("first"), "duplicate_custom_id", "custom_id"),
        (line("x", body=TEXT | {"prompt": "x" * LIMIT}), "line_too_large", None),
        (line("x", body=TEXT | {"prompt": "x" * 3_000_000}), "line_too_large", None),
    ],
)
def test_what_is_wrong_with_a_line_is_told(checked, wrong, code, param):
    _, found = checked(line("first"), wrong, line("last"))
    [error] = found.errors
    assert (error.code, error.param, error.line) == (code, param, 2)
    assert error.message
    assert len(error.message) < 300
    assert found.lines == ()


def test_a_line_as_large_as_the_largest_body_is_taken(checked):
    text = line("a")
    _, found = checked(text, limit=len(text) + 1)
    assert found.lines == (LinePlace(1, 0, len(text) + 1),)
    assert checked(text, limit=len(text))[1].errors[0].code == "line_too_large"


def test_lines_after_one_that_is_too_large_are_read_from_their_beginning(checked):
    _, found = checked(line("a", body=TEXT | {"prompt": "x" * 3_000_000}), "bad", line("c"))
    assert [(error.code, error.line) for error in found.errors] == [("line_too_large", 1), ("invalid_json_line", 2)]


@pytest.mark.parametrize("lines", [(), ("", " ", "\t")])
def test_a_file_without_requests_is_refused(checked, lines):
    _, found = checked(*lines)
    assert [(error.code, error.line) for error in found.errors] == [("empty_file", None)]


def test_errors_are_told_up_to_a_number(checked):
    _, found = checked(*["bad"] * (MAX_ERRORS + 10))
    assert [error.line for error in found.errors] == list(range(1, MAX_ERRORS + 1))


def test_more_lines_than_openai_takes_are_refused(checked):
    _, found = checked(*[line(str(n)) for n in range(MAX_LINES)])
    assert len(found.lines) == MAX_LINES
    _, found = checked(*[line(str(n)) for n in range(MAX_LINES + 1)])
    assert [error.code for error in found.errors] == ["too_many_tasks"]


def test_the_model_is_told_where_there_is_one(checked):
    assert checked(line("a"), line("b", body=TEXT | {"model": "other"}))[1].model is None
    assert checked(line("a", body={"prompt": "x"}), line("b", body={"prompt": "x", "model": 3}))[1].model is None
