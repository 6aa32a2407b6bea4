"""The machine that runs PTX finds every fence, barrier, arrival and wait that is missing, in a kernel that has one of each kind."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.ptx.faults import Run, mutations_of, outcome_of
from tests.ptx.launch import Launch, TensorMap

# The copy engine brings b[8, 16], a warpgroup multiplies [64, 16] of ones by its transpose, the copy engine takes the sums away, and their place
# is used again.
_KERNEL = """.visible .entry kernel(
)
{
mov.u32 %r1, %tid.x;
setp.ne.u32 %p1, %r1, 0;
mov.b32 %r2, 128;
@!%p1 mbarrier.init.shared.b64 [512], %r2;
fence.mbarrier_init.release.cluster;
bar.sync 0;
mov.b32 %r3, 2;
mbarrier.arrive.expect_tx.shared.b64 %rd1, [512], %r3;
@!%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [0], [kernel_param_2, {0, 0}], [512];
mov.b32 %r10, 1065369472;
mov.b32 %r20, 0;
mov.b32 %r21, 0;
mov.b32 %r22, 0;
mov.b32 %r23, 0;
mov.b64 %rd2, -4611685949707845632;
{
.reg .pred P1;
LAB_WAIT:
mbarrier.try_wait.parity.shared.b64 P1, [512], 0, 1000;
@P1 bra.uni DONE;
bra.uni LAB_WAIT;
DONE:
}
wgmma.fence.sync.aligned;
{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r20, %r21, %r22, %r23}, {%r10, %r10, %r10, %r10}, %rd2, p, 1, 1, 0;
}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
mul.wide.u32 %rd3, %r1, 16;
st.shared.v4.b32 [%rd3+1024], {%r20, %r21, %r22, %r23};
fence.proxy.async.shared::cta;
bar.sync 0;
ld.param.b64 %rd4, [kernel_param_1];
mov.b64 %rd5, 1024;
mov.b32 %r4, 2048;
@!%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd4], [%rd5], %r4;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
bar.sync 0;
st.shared.b32 [%rd3+1024], %r1;
mbarrier.arrive.release.cta.shared::cta.b64 %rd6, [512], 1;
{
.reg .pred P1;
LAB_WAIT:
mbarrier.try_wait.parity.shared.b64 P1, [512], 1, 1000;
@P1 bra.uni DONE;
bra.uni LAB_WAIT;
DONE:
}
xor.b32 %r5, %r1, 32;
mul.wide.u32 %rd7, %r5, 16;
ld.shared.b32 %r6, [%rd7+1024];
ret;
$L__func_end0:
}
"""
MUTATIONS = tuple(mutations_of(_KERNEL))


@functools.cache
def sound() -> Run:
    b = np.arange(128, dtype=np.uint32).astype(np.float32).reshape(8, 16)
    launch = Launch((1, 1, 1), 128, 4096, (0, 1, (TensorMap(0, (8, 16), (16, 1), 32, (8, 16)),)), _KERNEL)
    bits = (b.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16
    return Run.of(launch, [bits, np.zeros((128, 4), np.float32)])


def test_with_all_of_them_it_multiplies():
    expected = np.arange(128).reshape(8, 16).sum(1).reshape(1, 4, 2)
    np.testing.assert_array_equal(sound().after[1].reshape(32, 4, 2, 2), np.broadcast_to(expected[:, :, None], (32, 4, 2, 2)))
    for seed in range(10):
        arrays = sound().arrays()
        assert Run.of(sound().launch, arrays, seed=seed).after[1].tobytes() == sound().after[1].tobytes()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[f"{i}-{mutation.kind}" for i, mutation in enumerate(MUTATIONS)])
def test_what_is_missing_is_found(mutation):
    assert outcome_of(sound(), mutation, range(5)).is_found
