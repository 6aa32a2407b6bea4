"""What processes tell each other, as bytes and back."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.decode.batch import empty_batch
from jaxinfer.multi_process.messages import RemoteArray, RemoteCall, decode, encode
from jaxinfer.prefill.batch import empty_batch as empty_prefill_batch
from jaxinfer.sampling.params import neutral_rows


def nothing(_):
    return None


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def test_batches_arrays_and_plain_values_come_back_as_they_were():
    steps, rows = empty_batch(3, 8, 2), neutral_rows(3)
    steps.packed[:] = np.arange(steps.packed.size).reshape(steps.packed.shape)
    rows.temperature[1] = 0.7
    arguments = (
        *(steps, rows, empty_prefill_batch(32, 4, 6)),
        *(np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2], np.zeros((0, 4), bool), np.asarray(7, np.int64)),
        *([1, 2, 3], (), (4, (5, None)), "text", True, 2.5, -1),
    )
    call = decode(encode(RemoteCall(3, "decode", "run", arguments, {"micro_batch": 1}, (RemoteArray(1, 0),)), nothing), {})
    assert (call.number, call.target, call.method, call.keywords, call.released) == (
        3,
        "decode",
        "run",
        {"micro_batch": 1},
        (RemoteArray(1, 0),),
    )
    assert_same(call.arguments, arguments)
    assert call.arguments[3].flags.writeable, "an array of its own, not a view of the message"


def test_arrays_on_devices_go_by_name():
    here, there = object(), object()
    message = encode(RemoteCall(9, "decode", "run", ((here,),), {}, ()), lambda value: RemoteArray(4, 1) if value is here else None)
    assert decode(message, {RemoteArray(4, 1): there}).arguments == ((there,),)
    with pytest.raises(KeyError):
        decode(message, {})


@pytest.mark.parametrize("value", [object(), {1, 2}, RemoteArray(0, 0), b"bytes"])
def test_what_is_not_listed_is_refused(value):
    with pytest.raises(TypeError, match=f"a {type(value).__name__} can't be told to other processes"):
        encode(RemoteCall(0, "decode", "run", (value,), {}, ()), nothing)
