"""What transformers makes of each family's small checkpoint, beside its config.json. `make golden` runs it; one family alone:
`python -m tests.golden.family_logits.write NAME`. golden.npz is laid out as logits.npz, see ../write.py."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.models.gemma3 import modeling_gemma3

from tests.families import checkpoint
from tests.golden import summaries
from tests.golden.family_logits.read import FOLDER, MIN_KINDS, MIN_MARGIN, NUM_TOKENS
from tests.parity import reference

LENGTHS = (5, 21, 45, 70)  # of prompts: shorter than a window, longer than a chunk, and in several steps of prefill
NUM_VOCAB_IDS = 48
NUM_BEST = 8
NUM_PREFILL_POSITIONS = 8
_CALLED_OTHERWISE = {"KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration"}


def main(families: list[str]) -> None:
    for family in families or sorted(file.parent.name for file in FOLDER.glob("*/config.json")):
        config = checkpoint.config_of(family)
        with tempfile.TemporaryDirectory() as folder:
            shapes = saved_shapes(config, Path(folder))
            rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(shape)}" for name, shape in sorted(shapes.items()))
            (FOLDER / family / "tensors.json").write_text(f"{{\n{rows}\n}}\n")
            model = load(checkpoint.write(Path(folder), config, shapes))
        write_scores(family, model)


def saved_shapes(config: Mapping[str, Any], folder: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors that the configuration's class saves, by the names in the file. The folder is left empty."""
    model = _class(config)(_reference_config(config))
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {_published(name): tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    for file in folder.iterdir():
        file.unlink()
    return shapes


def load(folder: Path) -> PreTrainedModel:
    """The class that config.json names over a folder's checkpoint, in float32. Every tensor must find its place."""
    config = json.loads((folder / "config.json").read_text())
    attention = "capped" if config.get("text_config", config).get("attn_logit_softcapping") else "eager"
    model, info = _class(config).from_pretrained(folder, dtype=torch.float32, attn_implementation=attention, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def write_scores(family: str, model: PreTrainedModel) -> None:
    vocab_size = model.config.get_text_config().vocab_size
    vocab_ids = np.sort(np.random.default_rng(0).choice(vocab_size, NUM_VOCAB_IDS, replace=False)).astype(np.int32)
    arrays = {"vocab_ids": vocab_ids}
    for length in LENGTHS:
        prompt_ids, tokens, scores = clear_prompt(model, length, vocab_size)
        positions = np.unique(np.linspace(0, length - 1, NUM_PREFILL_POSITIONS).astype(np.int32))
        of_prompt = {"prompt_ids": np.array(prompt_ids, np.int32), "tokens": tokens, "prefill_positions": positions}
        of_prompt |= summaries.summary("", scores, vocab_ids, NUM_BEST)
        of_prompt |= summaries.summary("prefill_", reference.all_logits(model, prompt_ids)[positions], vocab_ids, NUM_BEST)
        arrays |= {f"{length} tokens/{key}": value for key, value in of_prompt.items()}
    np.savez_compressed(FOLDER / family / "golden.npz", **arrays)


def clear_prompt(model: PreTrainedModel, length: int, vocab_size: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """A random prompt, the first whose greedy continuation has no step that rounding could change and goes round in no small circle, that
    continuation and its scores."""
    for seed in range(100):
        ids = np.random.default_rng((length, seed)).integers(0, vocab_size, length).tolist()
        tokens, scores = reference.greedy(model, ids, NUM_TOKENS)
        best = np.sort(scores, axis=-1)
        margin, kinds = (best[:, -1] - best[:, -2]).min(), len(set(tokens.tolist()))
        print(f"{type(model).__name__}: {length} tokens, seed {seed}, smallest margin {margin:.4f}, {kinds} different tokens")
        if margin > MIN_MARGIN and kinds >= MIN_KINDS:
            return ids, tokens, scores
    raise AssertionError(f"no prompt of {length} tokens has clear margins: change the family's gains in tests/families/checkpoint.py")


def _class(config: Mapping[str, Any]) -> type[PreTrainedModel]:
    name = config["architectures"][0]
    return getattr(transformers, _CALLED_OTHERWISE.get(name, name))


def _published(name: str) -> str:
    """What a tensor is called that transformers saves: of Kimi K2.5 it loads other names than it saves."""
    return name.replace("language_model.model.blocks.", "language_model.model.layers.").replace("model.mm_projector.", "mm_projector.")


def _reference_config(config: Mapping[str, Any]) -> transformers.PreTrainedConfig:
    return _class(config).config_class(**config)


def _capped(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Gemma 3's attention with the cap that its configuration may have: transformers 5 hands it over in Gemma 2 alone."""
    return modeling_gemma3.eager_attention_forward(module, *args, softcap=module.attn_logit_softcapping, **kwargs)


AttentionInterface.register("capped", _capped)
AttentionMaskInterface.register("capped", eager_mask)

if __name__ == "__main__":
    main(sys.argv[1:])
