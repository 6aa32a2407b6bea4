"""The cost of spreading a model over devices: tensor parallel, in stages, and both. `__main__` runs it, `workload`
defines the measurements, `layout_worker` measures, `predictions` has the cost model's estimates, `charts` and `report`
show both."""
