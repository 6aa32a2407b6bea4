"""What routers may give a worker."""

from __future__ import annotations

ROLES = ("prefill", "decode", "both")
DRAINING = "draining"  # nothing new: it ends what it has begun, and then itself
