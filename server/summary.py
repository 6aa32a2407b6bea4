"""The short table that says what ran where, how fast, and where the memory went."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from jaxinfer.config import format_bytes
from jaxinfer.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Measured:
    """One request, as its caller saw it."""

    num_prompt_tokens: int
    num_output_tokens: int
    seconds_to_first_token: float
    seconds_after: float  # from the first token to the last

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding; None for fewer than two tokens."""
        return (self.num_output_tokens - 1) / self.seconds_after if self.num_output_tokens > 1 and self.seconds_after > 0 else None


def summary_table(stats: EngineStats, measured: Measured | None = None) -> Table:
    """Devices of each mesh, start, memory, and, of a request just answered, its speed and pages."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    is_shared = stats.prefill_devices == stats.decode_devices
    table.add_row("prefill mesh", ", ".join(stats.prefill_devices))
    table.add_row("decode mesh", ", ".join(stats.decode_devices) + (" (the same: one page pool)" if is_shared else ""))
    table.add_row("load", f"{stats.load_seconds:.2f} s")
    compiled = f"{stats.num_compilations} compiled, the others cached" if stats.num_compilations < stats.num_programs else "all compiled"
    table.add_row("compile", f"{stats.compile_seconds:.2f} s, {stats.num_programs} programs: {compiled}")
    if measured is not None:
        _add_speed(table, stats, measured)
    for part, num_bytes in stats.memory.items():
        table.add_row(part, format_bytes(num_bytes))
    return table


def _add_speed(table: Table, stats: EngineStats, measured: Measured) -> None:
    table.add_row("tokens", f"{measured.num_prompt_tokens} in the prompt, {measured.num_output_tokens} in the answer")
    table.add_row("time to first token", f"{measured.seconds_to_first_token * 1000:.0f} ms")
    rate = measured.tokens_per_second
    table.add_row("decode", "too short to tell" if rate is None else f"{rate:.1f} tokens/s")
    table.add_row("KV pages", f"{stats.peak_pages_used} used at most, of {stats.decode_pages}")
    table.add_row("compiled after ready", str(stats.num_compilations_after_ready))
