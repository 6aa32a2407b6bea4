"""What is read of an optimised program's text."""

from __future__ import annotations

import base64
import gzip

from benchmarks.gpu.compiled_program import algorithms, describe_program, launches, num_launches

# Written by hand after what XLA 0.10's backend for GPUs prints.
TEXT = """HloModule jit_step, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%fused_add (param_0: f32[8]) -> f32[8] {
  %param_0 = f32[8]{0} parameter(0)
  ROOT %add.1 = f32[8]{0} add(%param_0, %param_0)
}

%body (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[8]{0} fusion(%gte), kind=kLoop, calls=%fused_add
  %kernel = f32[8]{0} custom-call(%x), custom_call_target="mosaic_gpu_v2", backend_config={"kernel":"a fusion(kind=kInput) in words"}
  ROOT %pair = (s32[], f32[8]{0}) tuple(%i, %kernel)
}

ENTRY %main.1 (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %gemm.1 = (f32[8]{0}, s8[64]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"selected_algorithm":"13","alpha_real":1}}
  %gemm.2 = f32[8]{0} custom-call(%x, %x), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"selected_algorithm":"13"}}
  %gemm.3 = f32[8]{0} fusion(%x), kind=kCustom, calls=%g, backend_config={"fusion_backend_config":{"kind":"__triton_gemm","triton_gemm_config":{"block_m":"64","num_stages":"4"}}}
  %loop = (s32[], f32[8]{0}) while(%t), condition=%c, body=%body
  ROOT %add.2 = f32[8]{0} fusion(%gte.2), kind=kLoop, calls=%fused_add
}
"""


def test_launches_are_counted_by_kind_where_they_are() -> None:
    assert launches(TEXT) == {
        "entry": {"__cublas$gemm": 2, "kCustom": 1, "kLoop": 1},
        "called": {"kLoop": 1, "mosaic_gpu_v2": 1},
    }
    assert num_launches(TEXT) == 4


def test_choices_are_counted_as_they_were_told() -> None:
    assert algorithms(TEXT) == {'"selected_algorithm":"13"': 2, '"triton_gemm_config":{"block_m":"64","num_stages":"4"}': 1}


def test_the_text_comes_back() -> None:
    assert gzip.decompress(base64.b64decode(describe_program(TEXT)["hlo"])).decode() == TEXT
