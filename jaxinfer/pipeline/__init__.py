"""Pipeline stages (some of a model's layers on a mesh, with their pages) and clocks of meshes and stages."""
