"""A PageSpec as plain values, for another engine to compare its own with. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from jaxinfer.kv_cache.spec import PageSpec
from pallas_kernels.span import Span

MOST_PAGE_TOKENS = 1 << 16


def geometry_fields(spec: PageSpec) -> dict[str, Any]:
    """What JSON can hold."""
    return asdict(spec)


def read_geometry(fields: Mapping[str, Any]) -> PageSpec:
    """Raises `ValueError` for what is none."""
    try:
        spec = PageSpec(**{**fields, "spans": tuple(Span(**span) for span in fields["spans"])})
        if not 0 < spec.page_size <= MOST_PAGE_TOKENS:
            raise ValueError(f"pages of {spec.page_size} tokens")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"that is no page geometry: {error}") from error
    return spec
