from __future__ import annotations

import pytest

from jaxinfer.multi_process.peer_failure import PeerFailureMonitor


@pytest.fixture(autouse=True, scope="session")
def this_process_goes_on() -> None:
    """A monitor that notices late that its peer has closed would end the process while other tests run: what it does then is tested in processes of
    their own. Never undone, since on a busy machine late may be any time."""
    PeerFailureMonitor.end = lambda self: None  # type: ignore[method-assign]
