"""Measurements of this engine and its peers. Not in the wheel: run from a clone."""
