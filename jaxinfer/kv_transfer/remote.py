"""Remote: a request's other half, in another engine. Imports no JAX."""

from __future__ import annotations

from jaxinfer.kv_transfer.kv_receiver import KVReceiver
from jaxinfer.kv_transfer.kv_sender import KVSender

Remote = KVSender | KVReceiver  # who decodes what is prefilled here, or where what is decoded here is prefilled
