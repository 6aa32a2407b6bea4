"""`python -m benchmarks.peers.write_folder GGUF FOLDER`: the dequantised weights as a Hugging Face folder. Runs in
transformers' environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file


def main() -> None:
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    is_tied = model.config.tie_word_embeddings
    # By hand: `save_pretrained` refuses a model that was read from a GGUF file.
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if not (is_tied and name == "lm_head.weight")}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(model), indent=1), encoding="utf-8")
    model.generation_config.save_pretrained(folder)


def config_of(model: Any) -> dict[str, Any]:
    """Its config.json, valid for transformers 5 and for 4, which vLLM has."""
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    config["dtype"] = config["torch_dtype"] = "float32"
    config["rope_theta"] = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta"))
    return config


if __name__ == "__main__":
    main()
