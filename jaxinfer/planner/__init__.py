"""The planner: which layers, heads, weights and pages go on which devices, how much memory they take, how fast steps
would be.

`engine_plan` is for the engine, on the devices of this machine. `target_plan` is for `jaxinfer plan`, on target GPUs
(`target`), for requests (`workload`). It uses `memory`, `cost` (step times), `search` (all layouts, ranked) and
`target_programs` (compiled for the target); `report` and `plot` show it. `calibration` measures this processor.
"""
