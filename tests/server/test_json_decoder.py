"""Large bodies are read as Python's own decoder reads them, errors included."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.openai.json_decoder import PiecewiseDecoder

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.lists(st.integers(-99, 99)),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
)


def read(decoder, text):
    try:
        return decoder.decode(text)
    except json.JSONDecodeError as error:
        return error.msg, error.pos


@settings(max_examples=300)
@given(value=VALUES, indent=st.sampled_from([None, 1]), changed=st.none() | st.tuples(st.integers(0, 99), st.sampled_from('[]{},:"0-1 \n')))
def test_it_gives_what_python_gives(value, indent, changed):
    text = json.dumps(value, indent=indent)
    if changed is not None:
        at = changed[0] % (len(text) + 1)
        text = text[:at] + changed[1] + text[at + 1 :]
    assert read(PiecewiseDecoder(), text) == read(json.JSONDecoder(), text)


@pytest.mark.parametrize("end", ["]", ",]", ", \n]", ",01]", ",1.5]", ',"a"]', " , -3 \n]", "", ",", ",-]", ",[1,2]]"])
def test_long_lists_of_integers(end):
    text = "[" + ", ".join(map(str, range(-20_000, 20_000))) + end
    assert read(PiecewiseDecoder(), text) == read(json.JSONDecoder(), text)
