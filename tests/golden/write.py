"""`make golden`: what the reference implementation makes of tests/golden/prompts.json, into files small enough to check in.

logits.npz holds for every prompt NAME: NAME/prompt_ids, NAME/tokens (greedy), and for each token's step and for each of
NAME/prefill_positions (scores after that prompt token) the scores at `vocab_ids`, the 8 best ids and scores, and the logsumexp
over the whole vocabulary. tokenizer.json holds token ids of all texts and the rendered chats. embeddings.npz: see embeddings.py;
tokenizers: see tokenizers/write.py; family_logits: see family_logits/write.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from checkpoints import hub
from tests import tiny_encoder
from tests.golden import embeddings
from tests.golden.family_logits import write as family_logits
from tests.golden.summaries import summary
from tests.golden.tokenizers import write as tokenizers
from tests.parity import reference

FOLDER = Path(__file__).parent
NUM_TOKENS = 48
NUM_VOCAB_IDS = 256
NUM_BEST = 8
NUM_PREFILL_POSITIONS = 12


def main(names: list[str]) -> None:
    """All of it; with names of model families theirs alone."""
    if names:
        family_logits.main(names)
        return
    inputs = json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))
    tokenizer, model = reference.load_tokenizer(), reference.load_model()
    write_tokenizer(inputs, tokenizer)
    write_logits(inputs, tokenizer, model)
    write_embeddings()
    tokenizers.main()
    family_logits.main([])


def write_tokenizer(inputs: dict, tokenizer: PreTrainedTokenizerFast) -> None:
    chats = []
    for messages in inputs["chats"]:
        for add_generation_prompt in (False, True):
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
            chats.append({"messages": messages, "add_generation_prompt": add_generation_prompt, "text": text})
    texts = inputs["texts"] + [chat["text"] for chat in chats]
    corpus = []
    for text in texts:
        ids = tokenizer.encode(text)
        kept, skipped = (tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for skip in (False, True))
        corpus.append({"text": text, "ids": ids, "decoded": kept, "decoded_without_special": skipped})
    with (FOLDER / "tokenizer.json").open("w", encoding="utf-8") as file:
        json.dump({"corpus": corpus, "chats": chats}, file, ensure_ascii=False, indent=0)


def write_logits(inputs: dict, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel) -> None:
    vocab_size = model.config.vocab_size
    vocab_ids = np.sort(np.random.default_rng(0).choice(vocab_size, NUM_VOCAB_IDS, replace=False)).astype(np.int32)
    arrays = {"vocab_ids": vocab_ids}
    for prompt in inputs["prompts"]:
        text = (
            prompt["text"]
            if "text" in prompt
            else tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, tokenize=False)
        )
        prompt_ids = tokenizer.encode(text)
        tokens, scores = reference.greedy(model, prompt_ids, NUM_TOKENS)
        positions = np.unique(np.linspace(0, len(prompt_ids) - 1, NUM_PREFILL_POSITIONS).astype(np.int32))
        prefill_scores = reference.all_logits(model, prompt_ids)[positions]
        of_prompt = {"prompt_ids": np.array(prompt_ids, np.int32), "tokens": tokens, "prefill_positions": positions}
        of_prompt |= summary("", scores, vocab_ids, NUM_BEST) | summary("prefill_", prefill_scores, vocab_ids, NUM_BEST)
        arrays |= {f"{prompt['name']}/{key}": value for key, value in of_prompt.items()}
        margins = of_prompt["best_logits"][:, 0] - of_prompt["best_logits"][:, 1]
        print(f"{prompt['name']}: {len(prompt_ids)} tokens, smallest margin {margins.min():.4f}, {tokenizer.decode(tokens.tolist())!r}")
    np.savez_compressed(FOLDER / "logits.npz", **arrays)


def write_embeddings() -> None:
    folder = hub.resolve("minilm")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), reference.load_encoder(folder)
    token_lists = [tokenizer.encode(text) for text in embeddings.texts()]
    pooled = np.stack([reference.hidden_states(model, token_ids).mean(0) for token_ids in token_lists])
    with tempfile.TemporaryDirectory() as tiny:
        tiny_model = reference.load_encoder(tiny_encoder.write(Path(tiny)))
        states = [reference.hidden_states(tiny_model, token_ids) for token_ids in tiny_encoder.token_lists()]
    embeddings.save(
        embeddings.Golden(
            token_lists,
            pooled / np.linalg.norm(pooled, axis=1, keepdims=True),
            np.stack([state.mean(0) for state in states]),
            np.stack([state[0] for state in states]),
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
