"""Prefill and decode on different workers: what the hop costs, what it saves, and how requests find their workers."""
