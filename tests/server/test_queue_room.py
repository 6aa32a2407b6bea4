"""Room in the queue: a share of it for each tenant that waits, and a floor."""

from server.queue_room import WaitingRequest, has_room


def admitted(queue, tenant, count, size=32, priority=0):
    """How many of so many requests of a tenant come in, one after another, while no slot is free."""
    before = len(queue)
    for _ in range(count):
        if has_room(WaitingRequest(tenant, priority), queue, len(queue), size):
            queue.append(WaitingRequest(tenant, priority))
    return len(queue) - before


def test_alone_a_tenant_has_the_whole_queue():
    assert admitted([], "a", 100) == 32


def test_the_more_tenants_wait_the_less_each_has_down_to_a_floor():
    queue = []
    assert [admitted(queue, tenant, 100) for tenant in "abcd"] == [32, 16, 10, 6]  # the last up to twice the queue together
    assert admitted(queue, "e", 100) == 2  # a sixteenth, however crowded it is
    assert admitted(queue, "a", 100) == 0


def test_less_urgent_work_of_its_own_keeps_a_tenant_out_only_at_twice_the_queue():
    queue = []
    assert admitted(queue, "a", 100, priority=20) == 32
    assert admitted(queue, "a", 100) == 32
    assert admitted(queue, "a", 100, priority=-10) == 0
