"""Programs compiled ahead of time: compilation, the program cache on disk and its key, padded sizes, profiles."""
