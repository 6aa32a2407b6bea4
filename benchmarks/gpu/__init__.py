"""What this project's kernels and engine reach on one NVIDIA GPU, beside what the card can do and what else there is to run on it."""
