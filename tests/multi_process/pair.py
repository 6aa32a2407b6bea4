"""One of two processes that meet, start JAX over both, and wait: `python -m tests.multi_process.pair PROCESS_ID ADDRESS HEARTBEAT`."""

from __future__ import annotations

import sys
import time

from jaxinfer.config import EngineConfig
from jaxinfer.multi_process.peer_failure import ProcessLostError
from jaxinfer.multi_process.processes import lead, meet_leader


def main() -> None:
    process_id, address, heartbeat = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    settings = {"coordinator": address, "heartbeat_seconds": heartbeat, "connect_seconds": 60.0}
    if process_id:
        _, channel, messages = meet_leader(settings | {"process_id": process_id})
    else:
        lead(EngineConfig.of(**settings, num_processes=2))
    print(f"met {process_id}", flush=True)
    try:
        for _ in messages if process_id else ():
            pass
    except ProcessLostError as error:
        channel.monitor.report_lost(str(error))
        channel.monitor.end()
    time.sleep(60)


if __name__ == "__main__":
    main()
