"""What it costs to spread a model over devices: tensor parallel, in stages, and both. `__main__` runs it; `work` says what is measured, `layout_worker`
measures, `predicted` is what the cost model says, `charts` and `report` show both."""
