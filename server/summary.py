"""The short table after a run: what ran where, how fast, and the memory."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from jaxinfer.config import format_bytes
from jaxinfer.stats import EngineStats, TierStats


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """The timing of one request, as its caller measured it."""

    num_prompt_tokens: int
    num_output_tokens: int
    seconds_to_first_token: float
    seconds_after: float  # from the first token to the last

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding; None for fewer than two tokens."""
        return (self.num_output_tokens - 1) / self.seconds_after if self.num_output_tokens > 1 and self.seconds_after > 0 else None


def summary_table(stats: EngineStats, measured: RequestTiming | None = None) -> Table:
    """Devices of each mesh, start, memory, and speed and pages of a request just answered."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    is_shared = stats.prefill_devices == stats.decode_devices
    table.add_row("prefill mesh", _mesh(stats.prefill_devices, stats.prefill_layout))
    table.add_row("decode mesh", _mesh(stats.decode_devices, stats.decode_layout) + (" (the same: one page pool)" if is_shared else ""))
    table.add_row("load", f"{stats.load_seconds:.2f} s")
    compiled = f"{stats.num_compilations} compiled, the others cached" if stats.num_compilations < stats.num_programs else "all compiled"
    table.add_row("compile", f"{stats.compile_seconds:.2f} s, {stats.num_programs} programs: {compiled}")
    table.add_row("compute type", stats.compute_type)
    table.add_row("matrices", stats.weights)
    table.add_row("KV", f"pages for {stats.kv_tokens:,} tokens, of {stats.kv_dtype}")
    if stats.sampling_defaults:
        table.add_row("sampling defaults", f"{stats.sampling_defaults} (--generation-config none: off)")
    for role, cost in stats.heads.items():
        table.add_row(f"{role} heads", cost)
    for role, how in stats.latents.items():
        table.add_row(f"{role} latents", how)
    if measured is not None:
        _add_speed(table, stats, measured)
    for part, num_bytes in stats.memory.items():
        table.add_row(part, format_bytes(num_bytes))
    if stats.read_expert_loads is not None:
        for role, load in stats.read_expert_loads().items():
            of_devices = "" if load.of_devices is None else f", the busiest device {load.of_devices:.2f}x"
            most = f"{load.most_of_experts:.2f}x in the worst layer"
            table.add_row(f"{role} experts", f"the busiest had {load.of_experts:.2f}x the mean's tokens ({most}){of_devices}")
    if stats.read_tiers is not None:
        _add_tiers(table, stats.read_tiers())
    return table


def _mesh(devices: tuple[str, ...], layout: str) -> str:
    return ", ".join(devices) + (f": {layout}" if len(devices) > 1 else "")


def _add_tiers(table: Table, tiers: TierStats) -> None:
    if tiers.host_size:
        table.add_row("KV in host memory", f"{format_bytes(tiers.host_size)} at most, {tiers.host_pages} pages now")
    if tiers.disk_size:
        refused = ", ".join(f"{count} refused ({reason})" for reason, count in tiers.refused.items())
        table.add_row("KV on disk", f"{format_bytes(tiers.disk_size)} at most, {tiers.disk_pages} pages now{refused and f', {refused}'}")


def _add_speed(table: Table, stats: EngineStats, measured: RequestTiming) -> None:
    table.add_row("tokens", f"{measured.num_prompt_tokens} in the prompt, {measured.num_output_tokens} in the answer")
    table.add_row("time to first token", f"{measured.seconds_to_first_token * 1000:.0f} ms")
    rate = measured.tokens_per_second
    table.add_row("decode", "too short to tell" if rate is None else f"{rate:.1f} tokens/s")
    for name, (target, share) in stats.targets().items():
        met = "not measured" if share is None else f"met {share:.0%} of the time"
        table.add_row(f"target {name.upper()}", f"{target * 1000:.0f} ms: {met}")
    for role, share in stats.bubbles().items():
        table.add_row(f"{role} bubbles", f"{share:.0%} of the stages' time: they waited for one another")
    table.add_row("KV pages", f"{stats.peak_pages_used} used at most, of {stats.decode_pages}")
    table.add_row("compiled after ready", str(stats.num_compilations_after_ready))
