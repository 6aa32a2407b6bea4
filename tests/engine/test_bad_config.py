"""A configuration that can't work: the error names the setting, its value and what would be right, before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.architecture.model_config import UnsupportedModelError
from jaxinfer.config import ConfigError, EngineConfig, flat_fields, format_bytes, parse_bytes, parse_disk
from jaxinfer.llm import LLM
from jaxinfer.request import SamplingParams
from server.config import ServerConfig
from tests import tiny_model


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"page_sise": 16}, "unknown setting 'page_sise': did you mean page_size?"),
        ({"xyzzy": 1}, "unknown setting 'xyzzy': known are model, dtype"),
        ({"page_size": 0}, "page_size is 0: it must be at least 1"),
        ({"page_size": "16"}, "page_size is '16': it must be an integer"),
        ({"max_batch_size": 0}, "max_batch_size is 0: it must be at least 1"),
        ({"prefill_chunk_size": -5}, "prefill_chunk_size is -5: it must be at least 1"),
        ({"max_queue_size": 0}, "max_queue_size is 0: it must be at least 1"),
        ({"max_model_len": 1}, "max_model_len is 1: it must be at least 2"),
        ({"max_model_len": 2.5}, "max_model_len is 2.5: it must be an integer or None"),
        ({"cpu_devices": 0}, "cpu_devices is 0: it must be at least 1"),
        ({"decode_buckets": ()}, r"decode_buckets is \(\): give positive sizes, such as 1,8,32"),
        ({"prefill_buckets": (0, 32)}, r"prefill_buckets is \(0, 32\): give positive sizes"),
        ({"decode_buckets": 8}, "decode_buckets is 8: it must be integers, such as"),
        ({"kv_memory": "lots"}, "kv_memory is 'lots': give a size such as 512MiB"),
        ({"kv_memory": "-1GiB"}, "kv_memory is '-1GiB': give a size such as 512MiB"),
        ({"dtype": "float64"}, "dtype is 'float64': it must be one of auto, float32, bfloat16"),
        ({"decode_devices": (1, 1)}, r"decode_devices is \(1, 1\): give distinct device numbers"),
        ({"decode_devices": (-1,)}, r"decode_devices is \(-1,\): give distinct device numbers from 0"),
        (
            {"prefill_devices": (0, 1), "decode_devices": (1, 2)},
            r"prefill_devices \(0, 1\) and decode_devices \(1, 2\) overlap: make them the same or disjoint",
        ),
        (
            {"prefill_parallel": "tp=2", "decode_parallel": "pp=2", "prefill_devices": (0, 1), "decode_devices": (0, 1)},
            r"overlap: make them the same, with one layout \(not tp=2 and tp=1,pp=2\), or disjoint",
        ),
        ({"prefill_parallel": "tp=0"}, "prefill_parallel is 'tp=0': 'tp=0' is no part of a layout: give tp=N, pp=N or ep=N, N from 1"),
        ({"decode_parallel": "2x2"}, "decode_parallel is '2x2': '2x2' is no part of a layout"),
        ({"decode_parallel": "tp=2,dp=2"}, "'dp=2' is no part of a layout"),
        ({"decode_parallel": "tp=2,tp=4"}, "tp is given twice"),
        ({"decode_parallel": "tp=4,ep=2"}, "ep is 2: experts are dealt out to the tp=4 devices of a stage, so give ep=4 or leave it out"),
        (
            {"prefill_parallel": "tp=2,pp=2", "prefill_devices": (0, 1)},
            r"prefill_parallel is tp=2,pp=2, for 4 device\(s\), but prefill_devices is \(0, 1\), which are 2: give 4 devices, or a layout of 2",
        ),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_can_never_work_is_refused_at_once(settings, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig.of(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"decode_devices": (8,)},
            r"decode_devices is \(8,\): device 8 does not exist: this machine has 8 cpu device\(s\), numbered from 0; --cpu-devices",
        ),
        ({"prefill_devices": (1, 9)}, r"prefill_devices is \(1, 9\): device 9 does not exist"),
        ({"cpu_devices": 9}, "cpu_devices is 9, but JAX has started with 8"),
        (
            {"decode_parallel": "tp=3", "matmul_backend": "xla"},
            "parallel is tp=3: .*mlp axis of 128 can't be split over 3 devices; use a number of devices that divides 128, such as 2",
        ),
        (
            {"prefill_parallel": "tp=2,pp=3"},
            "prefill_parallel is tp=2,pp=3: 3 stages of 2 layers: each stage needs a layer; use a pp of 1 to 2",
        ),
        ({"prefill_parallel": "tp=8,pp=2"}, "prefill_devices is .*: device 8 does not exist: this machine has 8 cpu"),
        (
            {"kv_memory": "1KiB"},
            "kv_memory of 1024 bytes holds no KV page: a page of 16 tokens takes 8192 bytes .* give at least 16384 bytes, or a smaller page_size",
        ),
        ({"kv_memory": "90000GiB"}, "kv_memory is 90000GiB, but .* has .* GiB: give less, or auto"),
        ({"max_model_len": 1000}, "max_model_len is 1000: this model's context is 512 tokens"),
        (
            {"max_model_len": 500, "kv_memory": "64KiB"},
            "max_model_len is 500 tokens, but kv_memory holds 112: give kv_memory at least 264.0 KiB or lower",
        ),
        (  # on two devices each has half of every page
            {"max_model_len": 500, "kv_memory": "64KiB", "prefill_parallel": "tp=2"},
            "max_model_len is 500 tokens, but kv_memory holds 240: give kv_memory at least 132.0 KiB or lower",
        ),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_does_not_fit_model_and_machine_is_refused(tiny_model_path, settings, words):
    with pytest.raises(ConfigError, match=words):
        LLM(str(tiny_model_path), **settings)


def test_an_architecture_of_another_kind_is_refused(tmp_path):
    folder = tiny_model.write(tmp_path, architectures=["GPT2LMHeadModel"])
    with pytest.raises(UnsupportedModelError, match=r"architectures is \['GPT2LMHeadModel'\]: supported are .*LlamaForCausalLM"):
        LLM(str(folder))


def test_a_configuration_and_settings_together_are_refused():
    with pytest.raises(ConfigError, match="config is a whole configuration"):
        LLM(config=EngineConfig(), page_size=8)


def test_lists_will_do_where_several_are_wanted():
    config = EngineConfig.of(prefill_devices=[0], decode_buckets=[4, 2], max_batch_size=6)
    assert config.devices == EngineConfig().devices
    assert config.schedule.decode_buckets == (2, 4, 6)


def test_buckets_are_fitted_to_the_largest_step():
    schedule = EngineConfig.of(max_batch_size=20, decode_buckets=(32, 1, 8), prefill_chunk_size=64, prefill_buckets=(16,)).schedule
    assert schedule.decode_buckets == (1, 8, 20)
    assert schedule.prefill_buckets == (16, 64)


def test_a_context_that_does_not_fit_is_cut_unless_it_was_asked_for(llms):
    small = llms(kv_memory="64KiB", max_batch_size=8, decode_buckets=(8,), prefill_buckets=(128,))
    assert small.engine.max_model_len == 112
    [output] = small.generate([[1] * 100], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 12


def test_every_setting_has_help_and_a_default():
    settings = flat_fields()
    assert len({setting.name for setting in settings}) == len(settings) > 12
    assert all(setting.metadata["help"] and setting.default is not dataclasses.MISSING for setting in settings)
    EngineConfig.of(**{setting.name: setting.default for setting in settings})


def test_sizes_may_be_numbers_of_bytes():
    numbers = EngineConfig.of(kv_memory=512 * 2**20, kv_host_memory=np.int64(2**30), kv_disk=(Path("/tmp/kv:1"), 5 * 2**30)).cache
    texts = EngineConfig.of(kv_memory="512MiB", kv_host_memory="1GiB", kv_disk="/tmp/kv:1:5GiB").cache
    for name in ("kv_memory", "kv_host_memory"):
        assert parse_bytes(name, getattr(numbers, name)) == parse_bytes(name, getattr(texts, name))
    assert parse_disk("kv_disk", numbers.kv_disk) == parse_disk("kv_disk", texts.kv_disk) == ("/tmp/kv:1", 5 * 2**30)
    assert parse_bytes("kv_memory", EngineConfig.of(kv_memory=0.5e9).cache.kv_memory) == 500_000_000
    assert not parse_bytes("kv_host_memory", EngineConfig.of(kv_host_memory=0).cache.kv_host_memory)
    server = ServerConfig(max_body_size=2**20, max_file_size=3e6)
    assert (server.max_body_bytes, server.max_file_bytes) == (2**20, 3_000_000)
    with pytest.raises(ConfigError, match="max_file_size is '0B': give at least 1 byte"):
        ServerConfig(max_file_size=0)
    for value in (True, None, [1], 0.3, float("inf")):
        with pytest.raises(ConfigError, match=r"kv_memory is .*: it must be a size such as '512MiB', or a number of bytes"):
            EngineConfig.of(kv_memory=value)
    with pytest.raises(ConfigError, match="kv_memory is '-5B': give a size such as 512MiB"):
        EngineConfig.of(kv_memory=-5)


def test_sizes():
    assert [parse_bytes("x", text) for text in ("512", "512MiB", "1.5 GB", "2k", " 3GiB ")] == [512, 2**29, 1_500_000_000, 2048, 3 * 2**30]
    units = {"kB": 10**3, "kb": 10**3, "KiB": 2**10, "K": 2**10, "MB": 10**6, "mib": 2**20, "GB": 10**9, "gib": 2**30, "TB": 10**12}
    for unit, size in (units | {"TiB": 2**40, "tib": 2**40, "T": 2**40, "PB": 10**15, "PiB": 2**50, "b": 1}).items():
        assert parse_bytes("x", f"3{unit}") == 3 * size, unit
    assert parse_bytes("x", "0.5TiB") == 2**39
    assert parse_bytes("x", "9" * 400 + "GiB") > 10**400
    assert [format_bytes(count) for count in (0, 1023, 1536, 2**20, 5 * 2**40)] == ["0 B", "1023 B", "1.5 KiB", "1.0 MiB", "5.0 TiB"]
    for text in ("", "MiB", "1 2", "1e5", "five", "3 parsecs"):
        with pytest.raises(ConfigError, match=r"x is .* give a size such as"):
            parse_bytes("x", text)
