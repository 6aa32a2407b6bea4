"""The machine that runs PTX finds what several blocks at once, and two proxies of one memory, can get wrong."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.launch import Launch, TensorMap
from tests.ptx.machine import run
from tests.ptx.memory import LastOf

SEEDS = range(50)


def launch(body: str, num_blocks: int, num_parameters: int, num_threads: int = 32, **about) -> Launch:
    text = f".visible .entry kernel(\n)\n{{\n{body}\nret;\n$L__func_end0:\n}}\n"
    return Launch((num_blocks, 1, 1), num_threads, about.pop("shared_memory", 0), (*range(num_parameters), *about.pop("maps", ())), text)


# Each block doubles its number; the one that counts last adds them all up.
_STORE = """
ld.param.b64 %rd1, [kernel_param_0];
ld.param.b64 %rd2, [kernel_param_1];
ld.param.b64 %rd3, [kernel_param_2];
mov.u32 %r1, %ctaid.x;
mov.u32 %r9, %tid.x;
setp.ne.u32 %p3, %r9, 0;
mul.wide.u32 %rd4, %r1, 4;
add.u64 %rd5, %rd1, %rd4;
ld.global.u32 %r2, [%rd5];
add.u32 %r2, %r2, %r2;
{first}
{second}
setp.ne.u32 %p1, %r3, 7;
@%p1 bra $L_end;
mov.u32 %r4, 0;
mov.u32 %r5, 0;
$L_add:
mul.wide.u32 %rd6, %r4, 4;
add.u64 %rd7, %rd1, %rd6;
ld.global.u32 %r6, [%rd7];
add.u32 %r5, %r5, %r6;
add.u32 %r4, %r4, 1;
setp.lt.u32 %p2, %r4, 8;
@%p2 bra $L_add;
st.global.u32 [%rd3], %r5;
$L_end:
"""
_WRITE = "st.global.u32 [%rd5], %r2;"
# One thread counts; the others are told.
_COUNT = "@!%p3 atom.add.acq_rel.gpu.global.u32 %r3, [%rd2], 1;\nshfl.sync.idx.b32 %r3, %r3, 0, 31, -1;"


def sum_of_doubles(seed: int, first: str, second: str) -> int:
    numbers, count, total = np.arange(1, 9, dtype=np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    body = _STORE.replace("{first}", first).replace("{second}", second)
    run(launch(body, 8, 3), [numbers, count, total], num_resident=4, seed=seed, max_steps=5)
    return int(total[0])


def test_the_last_of_several_blocks_puts_together_what_all_wrote():
    assert {sum_of_doubles(seed, _WRITE, _COUNT) for seed in SEEDS} == {72}


def test_a_block_that_counts_before_it_writes_is_found_out():
    assert {sum_of_doubles(seed, _COUNT, _WRITE) for seed in SEEDS} != {72}


# Blocks take the next of 20 pieces of work until there is none, and count how often each was done.
_PERSISTENT = """
ld.param.b64 %rd1, [kernel_param_0];
ld.param.b64 %rd2, [kernel_param_1];
mov.u32 %r9, %tid.x;
setp.ne.u32 %p3, %r9, 0;
$L_next:
{take}
shfl.sync.idx.b32 %r3, %r3, 0, 31, -1;
setp.ge.u32 %p1, %r3, 20;
@%p1 bra $L_end;
mul.wide.u32 %rd4, %r3, 4;
add.u64 %rd5, %rd2, %rd4;
@!%p3 red.add.global.u32 [%rd5], 1;
bra $L_next;
$L_end:
"""
_TAKE = "@!%p3 atom.add.global.u32 %r3, [%rd1], 1;"
_TAKE_IN_THREE_STEPS = "ld.global.u32 %r3, [%rd1];\nadd.u32 %r4, %r3, 1;\n@!%p3 st.global.u32 [%rd1], %r4;"


def times_done(seed: int, take: str) -> list[int]:
    next_piece, done = np.zeros(1, np.uint32), np.zeros(20, np.uint32)
    run(launch(_PERSISTENT.replace("{take}", take), 5, 2), [next_piece, done], num_resident=5, seed=seed, max_steps=5)
    return done.tolist()


def test_persistent_blocks_do_each_piece_of_work_once():
    assert all(times_done(seed, _TAKE) == [1] * 20 for seed in SEEDS)


def test_a_piece_that_is_taken_in_several_steps_is_done_twice():
    assert any(times_done(seed, _TAKE_IN_THREE_STEPS) != [1] * 20 for seed in SEEDS)


_WAIT_FOR_ANOTHER = """
ld.param.b64 %rd1, [kernel_param_0];
mov.u32 %r1, %ctaid.x;
setp.eq.u32 %p1, %r1, 1;
@%p1 bra $L_set;
mbarrier.init.shared.b64 [%rd9], 1;
mbarrier.try_wait.parity.shared.b64 %p2, [%rd9], 0;
$L_set:
"""


def test_blocks_that_all_wait_are_an_error():
    with pytest.raises(RuntimeError, match=r"block \(0, 0, 0\): warps \[0\] wait for ever"):
        run(launch(_WAIT_FOR_ANOTHER.replace("[%rd9]", "[0]"), 2, 1, shared_memory=16), [np.zeros(1, np.uint32)], num_resident=2)


_COPY_OUT = """
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd1, %r1, 4;
st.shared.u32 [%rd1], %r1;
{fence}
bar.sync 0;
setp.ne.u32 %p1, %r1, 0;
@!%p1 cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [kernel_param_1, {0}], [0];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
"""


def copied_out(fence: str) -> list[int]:
    out = np.zeros(32, np.uint32)
    tensor = TensorMap(0, (32,), (1,), 16, (32,))
    run(launch(_COPY_OUT.replace("{fence}", fence), 1, 1, shared_memory=128, maps=((tensor,),)), [out])
    return out.tolist()


def test_the_copy_engine_reads_what_was_fenced():
    assert copied_out("fence.proxy.async.shared::cta;") == list(range(32))


def test_a_missing_fence_for_the_copy_engine_is_an_error():
    with pytest.raises(RuntimeError, match=r"that warps \[0\] wrote is read by another proxy without a fence"):
        copied_out("")


_OF_A_LARGE_ARRAY = """
ld.param.b64 %rd1, [kernel_param_0];
ld.param.b64 %rd2, [kernel_param_1];
mov.u32 %r1, %tid.x;
add.u32 %r1, %r1, 1000000;
{place}
add.u64 %rd4, %rd1, %rd3;
ld.global.u32 %r3, [%rd4];
ld.global.u32 %r4, [%rd2];
add.u32 %r3, %r3, %r4;
st.global.u32 [%rd4], %r3;
"""


def end_of_a_large_array(place: str) -> list[int]:
    """What a row of each thread is, of 1,000,032 rows of 8 KB that only the last are there of, when 5 was added to its first number."""
    rows, five = np.zeros((32, 2048), np.uint32), np.full(1, 5, np.uint32)
    rows[:, 0] = np.arange(32)
    run(launch(_OF_A_LARGE_ARRAY.replace("{place}", place), 1, 2), [LastOf(rows, 0, 1_000_032), five])
    return rows.sum(1).tolist()


def test_the_end_of_an_array_that_is_larger_than_this_machines_memory():
    assert end_of_a_large_array("mul.wide.u32 %rd3, %r1, 8192;") == list(range(5, 37))


@pytest.mark.parametrize("kind", ["u", "s"])
def test_a_place_that_is_worked_out_in_32_bits_is_an_error(kind):
    with pytest.raises(IndexError, match="is no array's"):
        end_of_a_large_array(f"mul.lo.{kind}32 %r2, %r1, 8192;\ncvt.{kind}64.{kind}32 %rd3, %r2;")
