"""`python -m benchmarks.peers.write_gguf GGUF OUT F16`: the file's weights dequantised, in a float type. Runs in
llama.cpp's environment."""

from __future__ import annotations

import ctypes
import sys

import llama_cpp

TYPES = {"F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16, "BF16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16, "F32": llama_cpp.LLAMA_FTYPE_ALL_F32}


def main() -> None:
    source, target, kind = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = TYPES[kind], True
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        sys.exit(f"{source} can't be written as {kind}")


if __name__ == "__main__":
    main()
