"""Plans for cards that are not here: arithmetic, where their compiler isn't either."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from jaxinfer.architecture.known_models import model_shape
from jaxinfer.config import ConfigError
from jaxinfer.planner.placement import RolePlacement
from jaxinfer.planner.report import a_layer, as_json, describe, ranking
from jaxinfer.planner.search import Layouts, PlanSettings
from jaxinfer.planner.target import Target
from jaxinfer.planner.target_model import TargetModel
from jaxinfer.planner.target_plan import TargetPlan, named_layouts, plan_target
from jaxinfer.planner.target_programs import CompiledProgram
from jaxinfer.planner.workload import Workload
from sharding.collectives import Collective
from sharding.layout import Parallel

GIB = 2**30
USUAL = Workload.of_means(2048, 256)


@cache
def shapes(model: str, target: str) -> TargetModel:
    return TargetModel(model_shape(model), Target.of(target))


@cache
def planned(
    model: str, target: str, prefill: str | None = None, decode: str | None = None, context: int = 8192, batch: int | None = 32
) -> TargetPlan:
    layouts = named_layouts(Target.of(target), prefill, decode)
    return plan_target(shapes(model, target), PlanSettings(context, USUAL, batch), layouts, num_compiled=0)


def test_bytes_add_up_and_pages_are_of_what_is_left() -> None:
    plan = planned("llama-3.1-8b", "1xh100", "tp=1")
    stage, memory = plan.chosen.decode_memory.stages[0], plan.chosen.decode_memory
    assert stage.weight_bytes == pytest.approx(8.03e9 * 2, rel=1e-3)
    assert stage.room_bytes == stage.total_bytes - stage.reserved_bytes - stage.weight_bytes - stage.activation_bytes > 60 * GIB
    assert stage.page_bytes == 16 * 131072
    assert plan.kv_tokens == (stage.room_bytes // stage.page_bytes - 1) * 16
    assert plan.fits
    two = planned("llama-3.1-8b", "2xh100", "tp=2").chosen.decode_memory.stages[0]
    assert two.weight_bytes == pytest.approx(stage.weight_bytes / 2, rel=1e-3)
    assert two.page_bytes == stage.page_bytes // 2, "KV heads are split"
    assert memory.kv_bytes(0) <= stage.room_bytes < memory.kv_bytes(0) + stage.page_bytes


def test_stages_share_out_weights_and_the_fullest_bounds_the_pages() -> None:
    plan = planned("llama-3.1-70b", "8xh100", "tp=2,pp=4")
    memory, whole = plan.chosen.decode_memory, planned("llama-3.1-70b", "8xh100", "tp=8").chosen.decode_memory
    assert sum(2 * stage.weight_bytes for stage in memory.stages) == pytest.approx(8 * whole.stages[0].weight_bytes, rel=1e-3)
    assert memory.num_pages == min(stage.room_bytes // stage.page_bytes for stage in memory.stages)
    assert sum(stage.page_bytes for stage in memory.stages) == 4 * whole.stages[0].page_bytes
    assert all(memory.kv_bytes(n) <= stage.room_bytes for n, stage in enumerate(memory.stages))


def test_experts_are_as_they_are_published() -> None:
    kimi = planned("kimi-k2.5", "8xh100", "tp=8")
    memory = kimi.chosen.decode_memory
    assert "experts int4" in str(kimi.chosen.decode.template.weight_format)
    assert 560e9 < 8 * memory.stages[0].weight_bytes < 620e9
    assert 8 * memory.kv_bytes(0) > 30 * GIB
    assert memory.stages[0].page_bytes == 16 * 70272, "of pages of 128 tokens every device has an eighth"
    assert "experts fp8" in str(planned("deepseek-v3", "8xh200", "tp=8").chosen.decode.template.weight_format)


def test_lossless_linear_layers_free_a_quarter_of_their_bytes_for_pages() -> None:
    """Of Llama-3.1-8B all but the embedding and the head, of 128,256 rows of 4,096 each."""
    plain = planned("llama-3.1-8b", "1xh100", "tp=1").chosen.decode_memory.stages[0]
    lossless = TargetModel(model_shape("llama-3.1-8b"), Target.of("1xh100"), weights="lossless")
    layouts = named_layouts(lossless.target, "tp=1", None)
    plan = plan_target(lossless, PlanSettings(8192, USUAL, 32), layouts, num_compiled=0)
    assert str(plan.chosen.decode.template.weight_format) == "bfloat16 lossless by mosaic_gpu"
    stage = plan.chosen.decode_memory.stages[0]
    in_layers = plain.weight_bytes - 2 * 2 * 128256 * 4096
    assert plain.weight_bytes - stage.weight_bytes == pytest.approx(in_layers * (1 - 12.0625 / 16), rel=1e-3)
    assert stage.room_bytes - plain.room_bytes == plain.weight_bytes - stage.weight_bytes > 3.4e9


def test_devices_share_latents_out_and_so_do_stages() -> None:
    shared, cut = (planned("kimi-k2.5", "8xh100", layout).kv_tokens for layout in ("tp=8", "tp=2,pp=4"))
    in_small_pages = TargetModel(model_shape("kimi-k2.5"), Target.of("8xh100"), page_size=16)
    layouts = named_layouts(in_small_pages.target, "tp=8", None)
    whole = plan_target(in_small_pages, PlanSettings(8192, USUAL, 32), layouts, num_compiled=0).kv_tokens
    assert shared == pytest.approx(8 * whole, rel=1e-3)
    assert "latents: shared out over 8 devices, in pages of 128 tokens" in planned("kimi-k2.5", "8xh100", "tp=8").notes
    assert shared > 600_000
    assert cut > 600_000


def test_whole_experts_are_as_many_bytes() -> None:
    columns, whole = (planned("kimi-k2.5", "8xh100", layout).chosen.decode_memory.stages[0] for layout in ("tp=8", "tp=8,ep=8"))
    assert columns.weight_bytes == whole.weight_bytes


def test_chunked_layers_leave_long_contexts_room() -> None:
    plan = planned("llama-4-scout", "2xh200", "tp=2", context=1_000_000)
    assert plan.fits
    assert plan.kv_tokens > 1_200_000
    assert plan.chosen.decode_memory.spec.lasting_token_bytes == 49152
    assert 2 * plan.chosen.decode_memory.kv_bytes(0) > 56 * GIB


def test_heads_that_do_not_divide_are_made_to_and_their_cost_is_told() -> None:
    plan = planned("qwen3-235b-a22b", "8xh100", "tp=8")
    assert any("KV heads 4 -> 8, 2 copies of each" in note for note in plan.notes)
    assert plan.chosen.decode_memory.stages[0].page_bytes == 16 * 94 * 2 * 128 * 2, "a head a device"


def test_roles_on_devices_of_their_own() -> None:
    plan = planned("llama-3.1-8b", "8xh100", "tp=4", "tp=2,pp=2")
    assert [name for name, _, _ in plan.roles] == ["prefill", "decode"]
    assert plan.kv_tokens == min(plan.chosen.prefill_memory.kv_tokens, plan.chosen.decode_memory.kv_tokens)
    assert plan.chosen.speed.handoff_seconds > 0
    assert len(as_json(plan)["devices"]) == 8
    alone = planned("llama-3.1-8b", "8xh100", "tp=4", "tp=4")
    assert alone.chosen.layouts.is_shared
    assert "4 device(s) idle" in alone.notes


def test_what_does_not_fit_is_told_with_what_would() -> None:
    plan = planned("llama-3.1-405b", "4xh100", "tp=4", batch=None)
    assert (plan.fits, plan.kv_tokens, plan.chosen.decode_memory.kv_bytes(0)) == (False, 0, 0)
    assert plan.changes == ("more of the same cards: 16xh100",)
    assert any("too much by" in value for _, value in describe(plan))
    long = planned("llama-3.1-70b", "4xh100", "tp=2,pp=2", context=131072, batch=8)
    assert long.fits
    short = planned("llama-3.1-70b", "2xh100", "tp=2", context=131072, batch=1)
    assert short.changes == (f"less context: --context {short.kv_tokens}", "more of the same cards: 4xh100")


@pytest.mark.exhaustive
def test_another_layout_of_the_same_cards_is_the_smallest_change() -> None:
    plan = planned("kimi-k2.5", "8xh100", "tp=8", context=800_000)
    assert not plan.fits
    assert plan.changes[0].startswith("another layout of 8xh100: both tp=")
    assert plan.changes[1] == f"less context: --context {plan.kv_tokens}"
    assert len(plan.changes) == 2


def test_without_layouts_the_quickest_that_fits_is_taken() -> None:
    plan = planned("llama-3.1-70b", "4xh100", batch=None)
    assert [one.fits for one in plan.ranked] == sorted((one.fits for one in plan.ranked), reverse=True)
    paces = [one.num_engines * one.speed.requests_per_second for one in plan.ranked if one.fits]
    assert all(later <= 1.03 * earlier for earlier, later in pairwise(paces))
    assert plan.chosen.layouts == next(one.layouts for one in plan.ranked if one.num_engines == 1)
    layouts = {one.layouts for one in plan.ranked}
    four = [Parallel(4), Parallel(2, 2), Parallel(1, 4)]
    assert {Layouts(layout, layout, True) for layout in four} < layouts
    assert Layouts(Parallel(2), Parallel(1, 2), False) in layouts
    assert all(one.layouts.num_devices * one.num_engines == 4 for one in plan.ranked)
    assert len(ranking(plan)) == 9


def test_several_small_engines_are_told_of() -> None:
    plan = planned("smollm2-135m", "4xh100", batch=None)
    assert any("4 engines, each of both tp=1, would do more" in note for note in plan.notes)
    assert plan.chosen.layouts.num_devices == 4


def test_longer_contexts_hold_fewer_sequences() -> None:
    short, long = (
        plan_target(shapes("llama-3.1-8b", "1xh100"), PlanSettings(8192, Workload.of_means(length, 256)), num_compiled=0).chosen.batch
        for length in (1024, 30000)
    )
    assert short == 256
    assert long == 16


@pytest.mark.parametrize(
    ("target", "prefill", "decode", "words"),
    [
        ("8xh100", "tp=8", "tp=4", "prefill tp=8; decode tp=4 take 12 devices, but 8xh100 has 8: .* such as 12xh100"),
        ("8xh100", "tp=two", None, "prefill_parallel is 'tp=two'"),
        ("8xh100", None, "tp=2,ep=4", "decode_parallel is 'tp=2,ep=4'"),
    ],
)
def test_layouts_that_can_not_be_are_refused(target: str, prefill: str | None, decode: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        named_layouts(Target.of(target), prefill, decode)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("tp=3", "prefill_parallel is tp=3: .* axis of .* can't be split over 3 devices"),
        ("tp=2,ep=2", "prefill_parallel is tp=2,ep=2, but this model has no experts: leave out ep=2"),
        ("pp=40", "prefill_parallel is tp=1,pp=40: 40 stages of 32 layers: .* use a pp of 1 to 32"),
    ],
)
def test_axes_that_do_not_divide_and_stages_without_layers_are_named(layout: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        planned("llama-3.1-8b", "64xh100", layout)


@pytest.mark.parametrize("target", ["h100", "8xa100", "0xh100", "8 x h100", ""])
def test_targets_that_are_not_known_are_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=r"such as 8xh100; known are b200, h100, h200, rtxpro6000"):
        Target.of(target)


def test_targets_have_names() -> None:
    assert [str(Target.of(name)) for name in ("8xh100", "CPU", "4xcpu", "2xH200")] == ["8xh100", "cpu", "4xcpu", "2xh200"]
    assert Target.of("4xcpu").memory_bytes == Target.of("cpu").memory_bytes // 4


def test_without_the_cards_compiler_it_says_that_it_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(card: str, num_devices: int) -> None:
        raise RuntimeError(f"no compiler for a {card}")

    monkeypatch.setattr("jaxinfer.planner.target_programs.target_devices", nowhere)
    plan = plan_target(shapes("smollm2-135m", "1xh200"), PlanSettings(8192, USUAL, 8))
    assert not plan.is_compiled
    assert "no compiler for a h200" in plan.notes
    assert any("(estimated)" in value for _, value in describe(plan))
    assert as_json(plan)["compiled"] is False


def test_faster_memory_speeds_up_decode() -> None:
    slow, fast = (planned("llama-3.1-8b", target, "tp=1").decode_steps for target in ("1xh100", "1xh200"))
    assert fast.round_seconds < slow.round_seconds
    assert replace(slow, num_micro_batches=2).round_seconds == pytest.approx(2 * slow.round_seconds)


def test_of_the_best_layouts_the_first_that_fits_once_compiled_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled programs of the first need far more than estimated, those of the second less."""
    compiled: list[str] = []

    def compile_role(shape: RolePlacement, *_: object) -> tuple[CompiledProgram, ...]:
        compiled.append(f"{shape.role} {shape.layout}")
        stays = 70 * GIB if len(compiled) <= 2 else GIB // 8
        return tuple(CompiledProgram(shape.role, stays, 0, ()) for _ in shape.stages)

    monkeypatch.setattr("jaxinfer.planner.target_plan.compile_role", compile_role)
    arithmetic = planned("llama-3.1-70b", "4xh100", batch=None)
    one = plan_target(shapes("llama-3.1-70b", "4xh100"), PlanSettings(8192, USUAL))
    assert (one.fits, one.chosen.layouts) == (False, arithmetic.chosen.layouts)
    compiled.clear()
    two = plan_target(shapes("llama-3.1-70b", "4xh100"), PlanSettings(8192, USUAL), num_compiled=2)
    assert two.fits
    assert two.is_compiled
    singles = [one.layouts for one in arithmetic.ranked if one.num_engines == 1]
    assert two.chosen.layouts == singles[1]
    assert {one.layouts: one.fits for one in two.ranked if one.num_engines == 1}[singles[0]] is False


def test_each_role_is_compiled_in_its_layout_on_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[object, ...]] = []

    def compile_role(shape: RolePlacement, target: Target, first: int, context: int, size: int) -> tuple[CompiledProgram, ...]:
        compiled.append((shape.role, str(shape.layout), first, context, size))
        return tuple(CompiledProgram(shape.role, 0, GIB * (2 if shape.role == "decode" else 1), ()) for _ in shape.stages)

    monkeypatch.setattr("jaxinfer.planner.target_plan.compile_role", compile_role)
    layouts = named_layouts(Target.of("8xh100"), "tp=4", "tp=2,pp=2")
    plan = plan_target(shapes("llama-3.1-8b", "8xh100"), PlanSettings(8192, USUAL, 33), layouts)
    assert compiled == [("decode", "tp=2,pp=2", 4, 8192, 17), ("prefill", "tp=4", 0, 8192, 2048)]
    assert [stage.activation_bytes for stage in plan.chosen.decode_memory.stages] == [2 * GIB, 2 * GIB]
    assert plan.chosen.prefill_memory.stages[0].activation_bytes == GIB


def test_what_is_too_large_by_its_weights_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_role(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("jaxinfer.planner.target_plan.compile_role", compile_role)
    plan = plan_target(shapes("llama-3.1-405b", "4xh100"), PlanSettings(8192, USUAL, 1), named_layouts(Target.of("4xh100"), "tp=4", None))
    assert "not compiled: weights alone take more than a device has" in plan.notes


def test_collectives_are_told_by_the_layer() -> None:
    in_layer, once = Collective("all-reduce", ("bf16[8,64]",)), Collective("all-gather", ("f32[8,20]",))
    programs = [CompiledProgram("a", 0, 0, ((in_layer, 21),)), CompiledProgram("b", 0, 0, ((in_layer, 20), (once, 1)), ((once, 22),))]
    assert a_layer(programs, 20) == ([(in_layer, 2)], [(once, 23), (in_layer, 1)])
