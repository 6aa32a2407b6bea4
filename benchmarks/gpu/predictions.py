"""The roofline of everything that is measured, by the datasheets' rates: the best result to expect before a GPU is
available."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu import grouped_matmul, latent_prefill_attention, paged_attention, ragged_prefill_attention, roofline, write_and_attend
from benchmarks.gpu.measure import seconds
from benchmarks.gpu.roofline import DATASHEET, RooflineWork
from benchmarks.gpu.sizes import DECODE, PREFILL, BenchmarkSizes


def works(sizes: BenchmarkSizes) -> Iterator[tuple[str, str, RooflineWork]]:
    """Name, size and work of each measurement."""
    size = sizes.matrix_size
    yield "copy", f"{sizes.copied_bytes / 2**20:g} MiB", RooflineWork(2 * sizes.copied_bytes, 0)
    yield "matmul", f"{size} x {size} x {size}", roofline.product(size, size, size, sizes.itemsize)
    for case, step in paged_attention.cases(sizes).items():
        yield "paged_attention", case, step.work
    for case, step in write_and_attend.cases(sizes).items():
        yield "write_and_attend", case, write_and_attend.work(step)
    for case, prompt in ragged_prefill_attention.cases(sizes).items():
        yield "ragged_prefill_attention", case, sizes.prefill_attention(prompt.num_new, prompt.num_cached)
    for case, expanded in latent_prefill_attention.cases(sizes).items():
        yield "latent_prefill_attention", case, expanded.work
    for case, (model, num_tokens) in grouped_matmul.cases(sizes).items():
        yield "grouped_matmul, there and back", case, grouped_matmul.work(model, grouped_matmul.groups(model, num_tokens, 0))
    for case, batch_and_context in paged_attention.plain_cases(sizes).items():
        yield DECODE, case, sizes.decode_step(*batch_and_context)
    for case, num_tokens in ragged_prefill_attention.plain_cases(sizes).items():
        yield PREFILL, case, sizes.prefill_step(num_tokens)


def page(sizes: BenchmarkSizes) -> str:
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
