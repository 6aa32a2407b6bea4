"""The decode program: a pure function that runs a row's new tokens through the model and samples the next, on the
device. On several devices it is split: one program for the forward pass, two for sampling."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxinfer.decode.batch import ON_DEVICE, DecodeBatch
from jaxinfer.decode.state import DecodeState
from jaxinfer.kv_cache.pages import KVScales, Pages
from jaxinfer.kv_cache.spec import LayerGroups
from jaxinfer.layers.attention_kernels import DecodeKernels
from jaxinfer.layers.paged_attention import PagedAttentionBackend
from jaxinfer.layers.step_context import NO_CONTEXT, StepContext
from jaxinfer.models.base import CausalLM, ModelSlice, run_slice
from jaxinfer.pipeline.expert_loads import with_loads
from jaxinfer.sampling.params import SamplingRows
from jaxinfer.sampling.penalties import add_sampled
from jaxinfer.sampling.sampler import Sampled, sample
from jaxinfer.weights.template import ModelTemplate, Weights
from pallas_kernels.dispatch import KernelBackend

Loads = Int[Array, "L E"] | None
ForwardStep = Callable[..., tuple[Pages, DecodeState, Float[Array, "B*T D"], Int[Array, "B 3"], Loads]]
DecodeStep = Callable[..., tuple[Pages, DecodeState, Sampled, Loads]]
SampleStep = Callable[..., tuple[DecodeState, Sampled]]


def decode_step(template: ModelTemplate, mesh: Mesh, attention: KernelBackend) -> DecodeStep:
    """The decode program where one device has the whole vocabulary: a whole model, or its last stage, with T = 1.
    Pages and state are donated. See `forward_step`. Forward pass and sampling are one program here: on a CPU two take
    longer."""
    feed, head = forward_step(template, mesh, attention), template.head

    def step(
        weights: Weights,
        pages: Pages,
        kv_scales: KVScales | None,
        state: DecodeState,
        batch: DecodeBatch,
        loads: Loads,
        sampling: SamplingRows,
        hidden: Float[Array, "B D"] | None = None,
        context: StepContext = NO_CONTEXT,
    ) -> tuple[Pages, DecodeState, Sampled, Loads]:
        handed = state.tokens if hidden is None else hidden
        pages, state, hidden, rows, loads = feed(weights, pages, kv_scales, state, batch, loads, handed, context)
        state, sampled = _sample(head.merge(template.head_weights(weights)), state, hidden, rows, sampling, is_chosen_by_host=False)
        return pages, state, sampled, loads

    return step


def forward_step(template: ModelTemplate, mesh: Mesh, attention: KernelBackend) -> ForwardStep:
    """The program of the forward pass over T new tokens a row, for a whole model or a stage. Pages and state are
    donated. `handed` is the last sampled tokens for the first stage, hidden states of the stage before for others.
    `loads`: see `pipeline.expert_loads`. The last stage returns hidden states of all new tokens, row by row;
    `sample_step` takes these for T = 1, with each row's slot, number of generated tokens and token."""

    def step(
        weights: Weights,
        pages: Pages,
        kv_scales: KVScales | None,
        state: DecodeState,
        batch: DecodeBatch,
        loads: Loads,
        handed: Int[Array, " S+1"] | Float[Array, "B*T D"],
        context: StepContext = NO_CONTEXT,
    ) -> tuple[Pages, DecodeState, Float[Array, "B*T D"], Int[Array, "B 3"], Loads]:
        model, page_table = template.merge(weights), state.page_table
        assert page_table is not None
        num_groups = _num_groups(model)
        new_tokens, new_pages = batch.new_tokens(num_groups), batch.new_pages(num_groups)
        num_rows, num_new = new_tokens.shape
        blocks = _positions(batch, num_new) // pages.shape[4]
        places = (blocks[:, :, None] * num_groups + jnp.arange(num_groups)).reshape(num_rows, -1)
        page_table = page_table.at[batch.slots[:, None], places].set(new_pages.reshape(num_rows, -1))
        tokens, hidden = (_fed(new_tokens, handed, batch.slots), None) if template.is_first else (new_tokens, handed)
        of_stage = template.part, hidden, context, kv_scales
        hidden, pages = forward(model, mesh, pages, tokens.reshape(-1), batch, page_table, attention, *of_stage)
        loads = with_loads(loads, model, jnp.repeat(batch.slots < len(page_table) - 1, num_new))
        # Returned from here: passing it from the host again would cost more.
        rows = jnp.stack([batch.slots, batch.num_generated, new_tokens[:, -1]], axis=1)
        return pages, state._replace(page_table=page_table), hidden, rows, loads

    return step


def sample_step(template: ModelTemplate) -> SampleStep:
    """The sampling programs, where the forward pass is a separate one, of a template's `head`. The host chooses: with
    sampling parameters each row is sampled by its own, without them greedily. The state is donated."""

    def step(
        weights: Weights,
        hidden: Float[Array, "B D"],
        rows: Int[Array, "B 3"],
        state: DecodeState,
        sampling: SamplingRows | None = None,
        mask: Int[Array, "B W"] | None = None,
    ) -> tuple[DecodeState, Sampled]:
        return _sample(template.merge(weights), state, hidden, rows, sampling, mask, is_chosen_by_host=True)

    return step


def _sample(
    head: CausalLM,
    state: DecodeState,
    hidden: Float[Array, "B D"],
    rows: Int[Array, "B 3"],
    sampling: SamplingRows | None,
    mask: Int[Array, "B W"] | None = None,
    *,
    is_chosen_by_host: bool,
) -> tuple[DecodeState, Sampled]:
    """The next token of each row, and the state with it. `rows`: from `forward_step`. `is_chosen_by_host`: parameters
    are given only if some row isn't greedy; otherwise the device checks that."""
    assert state.tokens is not None
    slots, num_generated = rows[:, 0], rows[:, 1]
    newest = _fed(rows[:, 2:], state.tokens, slots)[:, 0]
    sampled = sample(head, hidden, sampling, num_generated, state.counts, slots, newest, mask, is_chosen_by_host=is_chosen_by_host)
    counts = None if state.counts is None else add_sampled(state.counts, slots, sampled.tokens)
    return state._replace(tokens=state.tokens.at[slots].set(sampled.tokens), counts=counts), sampled


def _fed(tokens: Int[Array, "B T"], sampled: Int[Array, " S+1"], slots: Int[Array, " B"]) -> Int[Array, "B T"]:
    """The rows' input tokens: from the host, or last sampled in their slots."""
    return jnp.where(tokens == ON_DEVICE, sampled[slots][:, None], tokens)


def assign_slot(page_table: Int[Array, "S+1 W"], slot: Int[Array, ""], row: Int[Array, " W"]) -> Int[Array, "S+1 W"]:
    """Set the page table of a slot."""
    return page_table.at[slot].set(row)


def forward(
    model: CausalLM,
    mesh: Mesh,
    pages: Pages,
    tokens: Int[Array, " B*T"],
    batch: DecodeBatch,
    page_table: Int[Array, "S+1 W"],
    attention: KernelBackend = "xla",
    part: ModelSlice | None = None,
    hidden: Float[Array, "B*T D"] | None = None,
    context: StepContext = NO_CONTEXT,
    kv_scales: KVScales | None = None,
) -> tuple[Float[Array, "B*T D"], Pages]:
    """Hidden states of the rows' new tokens, and the pages with keys and values written. See
    `prefill.program.forward`."""
    new_pages = batch.new_pages(_num_groups(model))
    num_new, num_slots = new_pages.shape[1], page_table.shape[0] - 1
    positions = _positions(batch, num_new).reshape(-1)
    attend = PagedAttentionBackend.of(
        mesh,
        DecodeKernels(attention),
        model.config.layer_spans,
        None if part is None else part.layers,
        page_table[batch.slots],
        new_pages.reshape(len(positions), -1),
        positions % pages.shape[4],
        jnp.where(batch.slots < num_slots, batch.positions + num_new, 0),
        context.repeated(num_new),
        kv_scales,
    )
    return run_slice(model, part, tokens, hidden, positions, pages, attend)


def _positions(batch: DecodeBatch, num_new: int) -> Int[Array, "B T"]:
    """Positions of each row's new tokens."""
    return batch.positions[:, None] + jnp.arange(num_new, dtype=jnp.int32)


def _num_groups(model: CausalLM) -> int:
    return len(LayerGroups.of(model.config.layer_spans).spans)
