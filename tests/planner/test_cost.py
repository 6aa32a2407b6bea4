"""From steps to requests, held against the same sums made by hand."""

from __future__ import annotations

from functools import cache

import pytest

from jaxinfer.architecture.known_models import model_shape
from jaxinfer.planner.cost import Speed, decode_steps, most_sequences, prefill_steps, speed, stage_costs
from jaxinfer.planner.placement import RolePlacement
from jaxinfer.planner.target import Target
from jaxinfer.planner.target_model import TargetModel
from jaxinfer.planner.workload import RequestClass, Workload
from sharding.cost_model import Step, StepCost, move_seconds
from sharding.hardware import HARDWARE
from sharding.layout import Parallel

H100 = HARDWARE["h100"]
LONG = Workload.of_means(2048, 100)


@cache
def shape(layout: str) -> RolePlacement:
    return TargetModel(model_shape("llama-3.1-8b"), Target.of("8xh100")).place_shared(Parallel.parse(layout)).decode


def predicted(prefill: str, decode: str, workload: Workload = LONG, batch: int = 16, chunk_size: int = 2048) -> Speed:
    return speed(shape(prefill), shape(decode), workload, batch, chunk_size, H100, is_shared=prefill == decode)


def test_a_stages_cost_is_the_sum_of_its_parts() -> None:
    step = Step("decode", 4, 1, 500)
    whole, (first, last) = stage_costs(shape("tp=2"), step, H100)[0], stage_costs(shape("tp=2,pp=2"), step, H100)
    assert first.seconds + last.seconds == pytest.approx(whole.seconds + H100.step_seconds), "a call more"
    assert isinstance(whole, StepCost)


def test_sequences_are_cut_into_a_micro_batch_a_stage() -> None:
    steps = decode_steps(shape("tp=1,pp=4"), 10, 500, H100)
    assert steps.num_micro_batches == 4
    assert steps.costs == stage_costs(shape("tp=1,pp=4"), Step("decode", 3, 1, 500), H100)
    assert steps.move_seconds == move_seconds(3 * 4096 * 2, H100)
    assert steps.round_seconds >= 4 * max(steps.seconds)
    assert 0 < steps.bubble_share < 0.5


def test_roles_on_the_same_devices_take_turns() -> None:
    prompt = prefill_steps(shape("tp=2"), 1, 2048, 2048, H100).seconds[0]
    step = decode_steps(shape("tp=2"), 16, 2098, H100).round_seconds
    found = predicted("tp=2", "tp=2")
    assert found.requests_per_second == pytest.approx(1 / (prompt + 100 * step / 16))
    assert found.output_tokens_per_second == pytest.approx(100 * found.requests_per_second)
    assert found.token_seconds == pytest.approx(16 / found.output_tokens_per_second), "16 sequences get all of them"
    assert found.prefill_share + found.decode_share == pytest.approx(1)
    assert found.first_token_seconds == pytest.approx(prompt)
    assert found.handoff_seconds == 0


def test_of_roles_on_devices_of_their_own_the_slower_sets_the_pace() -> None:
    prompt = prefill_steps(shape("tp=1"), 1, 2048, 2048, H100).seconds[0]
    step = decode_steps(shape("tp=2"), 16, 2098, H100).round_seconds
    found = predicted("tp=1", "tp=2")
    assert found.requests_per_second == pytest.approx(min(1 / prompt, 16 / (100 * step)))
    assert max(found.prefill_share, found.decode_share) == pytest.approx(1)
    assert found.token_seconds == step
    slow = predicted("tp=4", "tp=1", batch=1)
    assert slow.decode_share == pytest.approx(1)
    assert slow.requests_per_second == pytest.approx(1 / (100 * decode_steps(shape("tp=1"), 1, 2098, H100).round_seconds))


def test_a_prompts_pages_go_over_as_many_links_as_both_have() -> None:
    assert predicted("tp=4", "tp=2,pp=1").handoff_seconds == pytest.approx(H100.link_seconds + 2048 * 131072 / 2 / H100.link_bandwidth)


def test_long_prompts_are_computed_in_chunks() -> None:
    """Of 5,000 tokens: two whole ones, and what is left, each over a longer context."""
    chunks = [prefill_steps(shape("tp=1,pp=2"), 1, n, end, H100) for n, end in ((2048, 2048), (2048, 4096), (904, 5000))]
    found = predicted("tp=1,pp=2", "tp=1,pp=2", Workload.of_means(5000, 1), batch=2)
    by_stage = [sum(chunk.seconds[stage] for chunk in chunks) for stage in (0, 1)]
    decoding = decode_steps(shape("tp=1,pp=2"), 2, 5000, H100).round_seconds / 2
    assert found.requests_per_second == pytest.approx(1 / (max(by_stage) + decoding), rel=1e-3)
    assert max(by_stage) < found.first_token_seconds < sum(by_stage)


def test_short_prompts_share_steps() -> None:
    """Eight of them at most, which is what a step has rows for."""
    together = prefill_steps(shape("tp=1"), 8, 100, 100, H100).seconds[0] / 8
    alone = prefill_steps(shape("tp=1"), 1, 100, 100, H100).seconds[0]
    found = predicted("tp=1", "tp=2", Workload.of_means(100, 1), batch=256)
    assert found.requests_per_second <= 1 / together
    assert found.first_token_seconds == pytest.approx(alone)
    assert together < alone / 2


def test_kinds_of_requests_are_weighed() -> None:
    kinds = RequestClass(1000, 10, 0.25), RequestClass(3000, 20, 0.75)
    both = predicted("tp=1", "tp=8", Workload(kinds, "both"))
    alone = [1 / predicted("tp=1", "tp=8", Workload.of_means(kind.input_length, 10), batch=256).requests_per_second for kind in kinds]
    assert both.requests_per_second == pytest.approx(1 / (0.25 * alone[0] + 0.75 * alone[1]))


def test_sequences_are_a_power_of_two_that_has_room() -> None:
    assert [most_sequences(pages, 10, 256) for pages in (9, 10, 39, 40, 100_000)] == [0, 1, 2, 4, 256]
