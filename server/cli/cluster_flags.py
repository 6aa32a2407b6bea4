"""What routers and workers are given to know each other by: certificates by flags, a token by the environment."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.workers.credentials import Credentials

TOKEN_VARIABLE = "JAXINFER_WORKER_TOKEN"


def add_cluster_flags(group: argparse._ArgumentGroup) -> None:
    """For routers and workers alike."""
    group.add_argument("--cluster-certificate", metavar="FILE", help="PEM file of this process's certificate, which it shows to the others")
    group.add_argument("--cluster-key", metavar="FILE", help="PEM file of its key")
    group.add_argument("--cluster-authority", metavar="FILE", help="PEM file of the authority that signed the others' certificates")
    group.add_argument(
        "--cluster-mutual-tls",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether those who connect must show a certificate too (default: yes)",
    )


def credentials(arguments: argparse.Namespace, flag: str, host: str) -> Credentials:
    """Of the flags and the environment, whose token is taken out of it. `host`: what `flag` says is listened on.

    Raises `ConfigError` for files that don't make TLS, and for an address that anybody could use."""
    from server.workers.cluster_tls import ClusterTls
    from server.workers.credentials import Credentials

    found = Credentials(os.environ.pop(TOKEN_VARIABLE, ""), ClusterTls.of(arguments))
    found.check_address(flag, host)
    return found
