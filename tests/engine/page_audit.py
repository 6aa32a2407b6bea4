"""Who owns which page: to be checked after every step of an engine."""

from __future__ import annotations

from collections import Counter

from jaxinfer.engine import Engine
from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.spec import NULL_PAGE, PageSpec
from jaxinfer.sequence import SequenceState


def audit(engine: Engine) -> None:
    """Assert that every page has just the owners that its reference count says, and every sequence what its state says."""
    components = engine._components
    sequences = [sequence for of_request in engine._requests.values() for sequence in of_request]
    owners = {id(m): Counter[int]() for m in (components.prefill.manager, components.decode.manager)}
    for sequence in sequences:
        owners[id(components.prefill.manager)].update(page for page in sequence.prefill.pages if page != NULL_PAGE)
        owners[id(components.decode.manager)].update(page for page in sequence.decode.pages if page != NULL_PAGE)
    for handoff in components.decode.outgoing:
        owners[id(components.decode.manager)].update(page for page in handoff.pages if page != NULL_PAGE)
    shared = components.prefill.manager._shared
    owners[id(components.prefill.manager)].update(shared.pages())
    assert {leader.request.request_id for leader in components.prefill.scheduler._shared._prompts} <= set(engine._requests)
    for manager in (components.prefill.manager, components.decode.manager):
        audit_pages(manager, owners[id(manager)])

    prefill, decode = components.prefill.scheduler, components.decode.scheduler
    in_state = {state: [s for s in sequences if s.state is state] for state in SequenceState}
    waiting = prefill.waiting
    assert set(waiting) == set(in_state[SequenceState.WAITING])
    assert set(prefill.prefilling) == set(in_state[SequenceState.PREFILLING])
    assert set(components.prefill.prefilled) == set(in_state[SequenceState.PREFILLED])
    assert set(decode.running) == set(in_state[SequenceState.RUNNING])
    assert not in_state[SequenceState.FINISHED]
    assert len(waiting) + len(prefill.prefilling) + len(components.prefill.prefilled) + len(decode.running) == len(sequences)
    for sequence in in_state[SequenceState.WAITING]:
        assert not sequence.prefill.pages
        assert not sequence.decode.pages
    for sequence in in_state[SequenceState.RUNNING]:
        assert not sequence.prefill.pages
        check_spans(components.decode.manager.spec, sequence.decode.pages, len(sequence.token_ids) - 1)
    assert len({s.decode.slot for s in decode.running}) == len(decode.running)
    assert sum(len(s) for s in (decode.running, prefill.prefilling, components.prefill.prefilled)) <= engine.config.schedule.max_batch_size

    stats = engine.stats
    assert (stats.num_waiting, stats.num_running) == (len(waiting), len(decode.running))
    assert stats.num_prefilling == len(prefill.prefilling) + len(components.prefill.prefilled)
    assert (stats.prefill_pages_used, stats.decode_pages_used) == (components.prefill.manager.num_used, components.decode.manager.num_used)
    assert (stats.prefill_pages_cached, stats.decode_pages_cached) == (
        components.prefill.manager.num_cached,
        components.decode.manager.num_cached,
    )


def audit_pages(manager: KVManager, owned: Counter[int]) -> None:
    """Assert that a pool's pages have so many owners each, and all others are to be had."""
    references = {page: manager._allocator.references(page) for page in range(manager.num_pages + 1)}
    assert {page: count for page, count in references.items() if count} == dict(owned)
    assert manager.num_used == len(owned)
    assert not manager._allocator.references(NULL_PAGE)
    cached = {page for page in range(manager.num_pages + 1) if manager._allocator.is_cached(page)}
    assert manager.num_cached == len(cached)
    assert manager.num_free == manager.num_pages - len(owned), "what nobody reads is to be had"
    free = manager._allocator._free
    assert len(set(free)) == len(free) == manager.num_pages - len(cached | set(owned))


def check_spans(spec: PageSpec, table: list[int], num_tokens: int) -> None:
    """Assert that a page table holds so many tokens: in every group what the next one attends to, and of a bounded one little else."""
    assert len(table) % spec.num_groups == 0
    assert len(table) >= spec.num_groups * spec.blocks_for(num_tokens)
    for group in range(spec.num_groups):
        pages = table[group :: spec.num_groups]
        assert NULL_PAGE not in pages[spec.first_run(group, num_tokens) : spec.blocks_for(num_tokens)]
        if spec.is_bounded[group]:
            assert len(pages) - pages.count(NULL_PAGE) <= spec.max_blocks(group, 1) + 1


def assert_all_free(engine: Engine) -> None:
    """Nothing is left of any request but, perhaps, a step under way when the last one ended."""
    engine.access.call()  # waits for the end of what an LLM's thread does
    audit(engine)
    while engine.has_work:
        assert engine.step() == []
    assert not engine._requests
    assert engine.stats.prefill_pages_used == engine.stats.decode_pages_used == 0
    assert engine._components.prefill.manager.num_used == engine._components.decode.manager.num_used == 0
    assert engine.stats.num_waiting == engine.stats.num_prefilling == engine.stats.num_running == 0
