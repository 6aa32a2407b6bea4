"""How many bytes a KV page takes. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass

# Page 0 belongs to no request: padded rows and padded tokens write there, so that no program needs a mask to write.
NULL_PAGE = 0


@dataclass(frozen=True, slots=True)
class PageSpec:
    """A page holds `page_size` tokens' keys and values in every layer of a model."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    page_size: int  # tokens
    bytes_per_value: int

    @property
    def page_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.page_size * self.bytes_per_value

    @property
    def token_bytes(self) -> int:
        return self.page_bytes // self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def num_pages(self, budget: int) -> int:
        """Pages of a pool of `budget` bytes, the null page included. Raises `ValueError` if not one is left for a request."""
        count = budget // self.page_bytes
        if count < 2:
            raise ValueError(
                f"kv_memory of {budget} bytes holds no KV page: a page of {self.page_size} tokens takes {self.page_bytes} bytes "
                f"and one is kept aside; give at least {2 * self.page_bytes} bytes, or a smaller page_size"
            )
        return count
