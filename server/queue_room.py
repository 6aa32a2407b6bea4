"""Limits of the waiting queue, shared by the tenants that wait in it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

FLOOR_SHARE = 16  # of this many tenants each has room, whatever the others do


class WaitingRequest(NamedTuple):
    """A request without a first token."""

    tenant: str
    priority: int


def has_room_for_texts(tenant: str, num_texts: int, waiting: Collection[tuple[str, int]], most: int) -> bool:
    """Whether a tenant may have `num_texts` more texts embedded. `waiting`: the tenant and the number of texts of each
    waiting request.

    A tenant may have one request of any size; with several it is limited to its share of `most`, divided as the queue
    is. All together have twice as many.
    """
    own = sum(number for other, number in waiting if other == tenant)
    num_tenants = len({other for other, _ in waiting} | {tenant})
    share = max(most // FLOOR_SHARE, most // num_tenants)
    return (own == 0 or own + num_texts <= share) and num_texts + sum(number for _, number in waiting) <= 2 * most


def has_room(request: WaitingRequest, unserved: Collection[WaitingRequest], num_waiting: int, max_queue_size: int) -> bool:
    """Whether another request may wait. `num_waiting` are those of `unserved` for which no slot is free.

    A tenant has its share of the queue, the whole of it divided by the tenants that wait, and at least a sixteenth. Of
    its own requests only those at least as urgent count, so that batches keep out nobody. All together have room for
    twice as many; beyond that a tenant has the sixteenth alone.
    """
    own = [other.priority for other in unserved if other.tenant == request.tenant]
    num_tenants = len({other.tenant for other in unserved} | {request.tenant})
    floor = max(1, max_queue_size // FLOOR_SHARE)
    share = max(floor, max_queue_size // num_tenants)
    num_ahead = min(num_waiting, sum(priority <= request.priority for priority in own))
    is_crowded = num_waiting >= 2 * max_queue_size and len(own) >= floor
    return num_ahead < share and not is_crowded
