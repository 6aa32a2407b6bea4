"""The two floors of everything that is measured, by the datasheets' rates: what to expect at best, before a card is there."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu import floors, grouped, latents, paged, prefill, written
from benchmarks.gpu.floors import DATASHEET, Work
from benchmarks.gpu.measure import seconds
from benchmarks.gpu.sizes import DECODE, PREFILL, Sizes


def works(sizes: Sizes) -> Iterator[tuple[str, str, Work]]:
    """Name, size, work of each thing that is measured."""
    size = sizes.matrix_size
    yield "copy", f"{sizes.copied_bytes / 2**20:g} MiB", Work(2 * sizes.copied_bytes, 0)
    yield "matmul", f"{size} x {size} x {size}", floors.product(size, size, size, sizes.itemsize)
    for case, step in paged.cases(sizes).items():
        yield "paged_attention", case, step.work
    for case, step in written.cases(sizes).items():
        yield "write_and_attend", case, written.work(step)
    for case, prompt in prefill.cases(sizes).items():
        yield "ragged_prefill_attention", case, sizes.prefill_attention(prompt.num_new, prompt.num_cached)
    for case, expanded in latents.cases(sizes).items():
        yield "latent_prefill_attention", case, expanded.work
    for case, (model, num_tokens) in grouped.cases(sizes).items():
        yield "grouped_matmul, there and back", case, grouped.work(model, grouped.groups(model, num_tokens, 0))
    for case, batch_and_context in paged.plain_cases(sizes).items():
        yield DECODE, case, sizes.decode_step(*batch_and_context)
    for case, num_tokens in prefill.plain_cases(sizes).items():
        yield PREFILL, case, sizes.prefill_step(num_tokens)


def page(sizes: Sizes) -> str:
    """As a table in Markdown."""
    cards = list(DATASHEET)
    lines = [
        "| what | size | bytes | operations | " + " | ".join(f"{card.upper()}: bytes, operations" for card in cards) + " |",
        "|---|---|---|---|" + "---|" * len(cards),
    ]
    for name, case, work in works(sizes):
        cells = [name, case, f"{work.num_bytes / 1e6:,.1f} MB", f"{work.num_flops / 1e9:,.1f} G"]
        for card in cards:
            rates = DATASHEET[card]
            both = [seconds(work.num_bytes / rates.bytes_per_s), seconds(work.num_flops / rates.flops_per_s)]
            place = 0 if rates.bound(work) == "copy" else 1
            both[place] = f"**{both[place]}**"
            cells.append(", ".join(both))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
