"""Parameters of other servers or clients that would change the answer, and that this server does not implement.

Each has its neutral values, which are accepted. A name that a request's model has as a field is not looked up here.
"""

from __future__ import annotations

from typing import Any

Harmless = dict[str, tuple[Any, ...]]

STRUCTURE: Harmless = {
    **dict.fromkeys(("json_schema", "regex", "ebnf", "grammar", "format"), ()),
}
SAMPLING: Harmless = {
    **dict.fromkeys(("logits_processors", "logit_processors", "custom_logit_processor", "custom_params", "vllm_xargs", "samplers"), ()),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "repeat_penalty": (1,),
    "penalty_alpha": (),
    "sampling_seed": (),
    "stop_regex": ([],),
    # Other names of parameters that exist here.
    **dict.fromkeys(("max_new_tokens", "max_output_tokens", "max_length", "n_predict", "num_predict"), ()),
    **dict.fromkeys(("min_new_tokens", "min_length"), (0,)),
    **dict.fromkeys(("stop_sequences", "options", "parameters", "generation_config", "model_kwargs", "extra_body"), ([], {})),
}
PROMPT: Harmless = {
    "prompt_embeds": (),
    "input_embeds": (),
    "kv_transfer_params": (),
    **dict.fromkeys(("lora_path", "lora_request", "adapter_id"), ()),
}
OUTPUT: Harmless = {
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "return_hidden_states": (False,),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), (False,)),
}
MEDIA: Harmless = {"modalities": (["text"],), "audio": (), "images": ([],)}
COMMON: Harmless = STRUCTURE | SAMPLING | PROMPT | OUTPUT | MEDIA

CHAT: Harmless = COMMON | {
    "add_special_tokens": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    "plugins": ([],),
    "documents": ([],),
    "chat_template": (),
    "echo": (False,),
    "best_of": (1,),
    # For reasoning; what a template reads goes into chat_template_kwargs.
    **dict.fromkeys(("thinking", "thinking_budget", "thinking_token_budget", "reasoning"), ()),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "reasoning_format": (),
    # From other APIs: they would be part of the prompt.
    **dict.fromkeys(("system", "instructions", "input", "prompt", "previous_response_id", "conversation"), ()),
}
COMPLETION: Harmless = COMMON | {"suffix": ("",), "tools": ([],), "add_special_tokens": (True,)}
EMBEDDING: Harmless = {
    **dict.fromkeys(("input_type", "task", "task_type", "prompt_name", "instruction", "query_instruction", "late_chunking"), ()),
    "normalize": (True,),
    "normalize_embeddings": (True,),
    "embedding_type": ("float",),
    "embedding_types": (["float"],),
    "output_dimension": (),
    "output_dimensionality": (),
    "truncate": (),
    "add_special_tokens": (True,),
    "messages": (),
    "images": ([],),
    "output_dtype": ("float",),
    "pooling": (),
    "pooling_type": (),
}

# Parameters that can't change an answer, and are refused where parameters are read strictly.
HARMLESS_BUT_STRICT: Harmless = {
    "store": (False,),
    "verbosity": (),
    "prediction": (),
}
