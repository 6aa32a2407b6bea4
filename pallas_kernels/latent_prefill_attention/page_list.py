"""The pages of all requests of a step as one list, request after request, which is cut into runs of context."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class PageList:
    latent_pages: Float[Array, "L 1 P 1 G C"]
    layer: Int[Array, ""]
    page_table: Int[Array, "X W"]
    begin: Int[Array, " X"]  # where each row's pages begin in the list
    end: Int[Array, " X"]
    axis: str | None  # mesh axis whose devices each have G of every page's tokens; None where pages are whole

    @classmethod
    def for_rows(cls, latent_pages: Array, layer: Array, page_table: Array, kv_len: Int[Array, " X"], axis: str | None) -> PageList:
        """The list for contexts of `kv_len` tokens."""
        page_size = latent_pages.shape[4] * _num_parts(axis)
        num_pages = (kv_len + page_size - 1) // page_size
        end = jnp.cumsum(num_pages)
        return cls(latent_pages, layer, page_table, end - num_pages, end, axis)

    @property
    def num_parts(self) -> int:
        """Devices that each page's tokens are split over."""
        return _num_parts(self.axis)

    @property
    def page_size(self) -> int:
        """Tokens of a page on all devices."""
        return self.latent_pages.shape[4] * self.num_parts

    def num_runs(self, run_pages: int) -> Int[Array, ""]:
        """Runs of `run_pages` pages that cover the list."""
        return (self.end[-1] + run_pages - 1) // run_pages

    def locate(self, place: Int[Array, " P"]) -> tuple[Int[Array, " P"], Int[Array, " P"]]:
        """The row of each of the list's pages, and its index in that row. Past the list's end the index is past the
        row's last page, so that no query sees it."""
        row = jnp.minimum(jnp.sum(place[:, None] >= self.end, axis=1), len(self.page_table) - 1)
        return row, place - self.begin[row]

    def read(self, place: Int[Array, " P"]) -> Float[Array, "P G*C"]:
        """This device's part of each of the list's pages."""
        num_layers, _, num_pages, _, part_size, width = self.latent_pages.shape
        # "clip": page numbers are the allocator's, always in range, and the default mode would mask every element.
        ids = self.page_table.at[self.locate(place)].get(mode="clip")
        pool = self.latent_pages.reshape(num_layers * num_pages, part_size * width)
        return jnp.take(pool, self.layer * num_pages + ids, axis=0, mode="clip")

    def read_whole(self, place: Int[Array, " P"]) -> Float[Array, "S C"]:
        """All devices' parts, in the order of their tokens."""
        width, own = self.latent_pages.shape[-1], self.read(place)
        if self.axis is None:
            return own.reshape(-1, width)
        parts = jax.lax.all_gather(own, self.axis, axis=1)  # [P, D, G*C]
        return parts.reshape(-1, width)


def _num_parts(axis: str | None) -> int:
    return 1 if axis is None else jax.lax.axis_size(axis)
