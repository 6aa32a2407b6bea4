"""Dry runs: what a model comes to on cards that this machine doesn't have, from its shapes alone, by compiling the engine's own programs for them.

`target` (cards) and `workload` (requests) say what for; `shapes` is the model in a layout, `memory` where bytes go, `predict` how long steps take,
`search` all layouts ranked; `programs` compiles; `run` puts them together, `report` tells, `plot` draws.
"""
