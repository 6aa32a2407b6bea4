"""`jaxinfer top`: what a router's workers, or a server, do at this moment."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxinfer.config import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

_KEY_VARIABLE = "OPENAI_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whom to ask, and how often."""
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="of a router or a server (default: http://127.0.0.1:8000)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one look and end")


def run(arguments: argparse.Namespace) -> int:
    """Until Ctrl+C. Raises `ConfigError` where nobody answers at first."""
    import httpx
    from rich.console import Console
    from rich.live import Live

    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(_KEY_VARIABLE)) else {}
    with httpx.Client(base_url=arguments.url, headers=headers, timeout=5.0) as client:

        def look() -> dict[str, Any]:
            try:
                answer = client.get("/stats")
                answer.raise_for_status()
                found: dict[str, Any] = answer.json()
            except (httpx.HTTPError, ValueError) as error:
                raise ConfigError(f"{arguments.url}/stats does not answer ({error}): give the URL of a router or a server") from error
            return found

        before, began = look(), time.monotonic()
        console = Console()
        if arguments.once:
            console.print(table(before, before, 1.0))
            return 0
        with Live(table(before, before, 1.0), console=console, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(arguments.interval)
                try:
                    now = look()
                except ConfigError as error:
                    live.update(str(error), refresh=True)
                    continue
                seconds, began = time.monotonic() - began, time.monotonic()
                live.update(table(before, now, seconds), refresh=True)
                before = now


# In two lines each: a terminal of 80 columns shows all.
_NUMBERS = ("\nqueued", "in\nprefill", "in\ndecode", "from\nothers", "\npages", "\ntok/s", "prefill\ntok/s", "pulls\nMB/s")


def table(before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> Table:
    """One row a worker; of a server without workers, itself. Rates are of the `seconds` between both looks."""
    from rich.table import Table

    rate = (now["output_tokens"] - before["output_tokens"]) / seconds
    title = f"{rate:,.0f} tokens/s   first token {_milliseconds(now['time_to_first_token'])}   between tokens {_milliseconds(now['inter_token_latency'])}"
    cluster = now.get("cluster")
    if cluster is not None:
        title += f"   migrations {cluster['num_migrations']}"
    shown = Table(
        title=title, title_justify="left", box=None, padding=(0, 1), collapse_padding=True, pad_edge=False, header_style="bold underline"
    )
    for name in ("worker", "role"):
        shown.add_column(f"\n{name}", no_wrap=True, min_width=15 if name == "worker" else 7)
    for name in _NUMBERS:
        shown.add_column(name, justify="right", no_wrap=True)
    if cluster is None:
        used, total = now["pages"]["decode"]
        shown.add_row("this server", "both", *(str(now[key]) for key in ("waiting", "prefilling", "running")), "", _share(used, total))
        return shown
    known = {worker["worker_id"]: worker for worker in (before.get("cluster") or {}).get("workers", ())}
    for worker in cluster["workers"]:
        gained = worker["num_output_tokens"] - known.get(worker["worker_id"], worker)["num_output_tokens"]
        used = worker["num_used_pages"]
        shown.add_row(
            worker["address"],
            worker["role"],
            *(str(worker[f"num_{key}"]) for key in ("waiting", "prefilling", "running", "incoming")),
            _share(used, used + worker["num_free_pages"]),
            f"{gained / seconds:,.0f}",
            f"{worker['prefill_tokens_per_second']:,.0f}",
            f"{worker['pull_bytes_per_second'] / 1e6:,.0f}",
        )
    return shown


def _share(used: int, total: int) -> str:
    return f"{used / max(total, 1):.0%}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.0f} ms"
