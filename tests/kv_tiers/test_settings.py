"""The two settings of the tiers: what is refused, and what is read from them."""

from __future__ import annotations

import pytest

from jaxinfer.config import ConfigError, EngineConfig, parse_disk


def test_tiers_are_off_unless_given():
    cache = EngineConfig().cache
    assert (cache.kv_host_memory, cache.kv_disk) == (None, None)
    EngineConfig.of(kv_host_memory="0")
    EngineConfig.of(kv_host_memory="2GiB", kv_disk="/tmp/kv.bin:20GiB")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_host_memory": "much"}, "kv_host_memory is 'much': give a size such as 512MiB"),
        ({"kv_host_memory": 5.5}, "kv_host_memory is 5.5: it must be a size such as '512MiB', or a number of bytes"),
        ({"kv_host_memory": ""}, "kv_host_memory is '': give a size"),
        ({"kv_disk": "/tmp/kv.bin", "kv_host_memory": "1GiB"}, "kv_disk is '/tmp/kv.bin': give PATH:SIZE, such as"),
        ({"kv_disk": ":20GiB", "kv_host_memory": "1GiB"}, "kv_disk is ':20GiB': give PATH:SIZE"),
        ({"kv_disk": "/tmp/a:b", "kv_host_memory": "1GiB"}, "kv_disk's size is 'b': give a size such as"),
        ({"kv_disk": "/tmp/kv.bin:1GiB"}, "kv_disk is /tmp/kv.bin:1GiB, but pages reach it through host memory: give kv_host_memory"),
        ({"kv_disk": "/tmp/kv.bin:1GiB", "kv_host_memory": "0"}, "give kv_host_memory too"),
        ({"kv_host_memory": "1GiB", "prefix_cache": False}, "kv_host_memory is 1GiB, but without prefix_cache no page is cached"),
    ],
    ids=str,
)
def test_what_can_never_work_is_refused_at_once(settings, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig.of(**settings)


def test_a_path_may_hold_colons():
    assert parse_disk("x", "/mnt/a:b/kv.bin:1.5KiB") == ("/mnt/a:b/kv.bin", 1536)
    assert parse_disk("x", "kv.bin:0") == ("kv.bin", 0)
