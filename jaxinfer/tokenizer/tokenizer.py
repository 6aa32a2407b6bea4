"""Tokenizer: text to token ids and back, and chats to prompts, from a GGUF file's metadata or a model's folder."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from checkpoints.gguf_source import GGUFSource
from checkpoints.source import TensorSource
from jaxinfer.request import RequestError, SamplingParams
from jaxinfer.tokenizer.byte_level import BYTES
from jaxinfer.tokenizer.chat_template import ChatTemplate
from jaxinfer.tokenizer.folder import read_folder
from jaxinfer.tokenizer.gguf import read_gguf
from jaxinfer.tokenizer.length import length_bound
from jaxinfer.tokenizer.sentencepiece import SPACE
from jaxinfer.tokenizer.untrusted_text import ControlTokens, PromptText

_LINE = "\n"
_PARTS_AT_ONCE = 1024  # parts of a cut text that are encoded together, to bound memory


class TextTooLong(RequestError):
    """A text with too many tokens. `measure` is its length, such as '9000 tokens' or 'at least 9000 tokens'."""

    def __init__(self, measure: str, max_tokens: int) -> None:
        super().__init__(f"the text has {measure}: at most {max_tokens} fit; shorten it", "prompt", "context_length_exceeded")
        self.measure = measure


class Tokenizer:
    """`vocab_size` includes added tokens. `eos_token_ids` are all that end a reply; `bos_token_id` is None without one.

    `special_ids`: tokens that `decode` leaves out by default. `is_byte_level`: every token is a sequence of bytes, and
    decoding joins them. `token_bytes(token_id)`: the bytes of a token; of a special token its name's, of an unknown id
    none. `token_text(token_id)`: their text if they are whole characters, else None. `response_template`: the
    checkpoint's own, unchecked; None without one.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, bos: int | None, eos: Sequence[int], template: ChatTemplate, response_template: Any = None
    ) -> None:
        self._backend = backend
        self._template = template
        self.response_template = response_template
        self._bound = length_bound(backend)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = bos
        self.eos_token_ids = tuple(dict.fromkeys(eos))
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self.token_bytes = functools.cache(self._token_bytes)  # called for every token of every sequence
        self.token_text = functools.cache(self._token_text)

    def to_json(self) -> str:
        """As a tokenizer.json has it."""
        return self._backend.to_str()

    @functools.cached_property
    def digest(self) -> str:
        """The same for tokenizers that give the same ids."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @classmethod
    def from_source(cls, source: TensorSource) -> Tokenizer:
        """The tokenizer of a checkpoint. Raises `CheckpointError` if it is missing, corrupt or unsupported."""
        return cls(*read_gguf(source.path, source.metadata)) if isinstance(source, GGUFSource) else cls.from_folder(source.path)

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """The tokenizer in a model's folder, which needs no weights. Raises as `from_source`."""
        return cls(*read_folder(path))

    def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]:
        """Token ids, by default with the special tokens that the model expects around a prompt. Other threads run
        meanwhile.

        Raises `TextTooLong` for a text of more than `max_tokens` (before any work, if its length shows it), and
        `RequestError` for text that is not Unicode (half a surrogate pair, which JSON allows).
        """
        cuts = text.cuts if isinstance(text, PromptText) else ()
        if cuts and add_special_tokens:
            raise ValueError("a chat's prompt has its special tokens already: encode it with add_special_tokens=False")
        if max_tokens is not None and (num_tokens := self._bound.min_tokens(text, max_tokens)) > max_tokens:
            raise TextTooLong(f"at least {num_tokens} tokens", max_tokens)
        try:
            if cuts:
                return self._encode_apart(text, cuts, max_tokens)
            # A batch of one, because the library keeps Python's lock while it encodes a single text.
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                "the text holds half a surrogate pair (such as \\ud83d alone), which is no character: send the whole pair", "prompt"
            ) from error
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TextTooLong(f"{len(encoding)} tokens", max_tokens)
        return encoding.ids

    def _encode_apart(self, text: str, cuts: Sequence[int], max_tokens: int | None) -> list[int]:
        """Token ids of the pieces between cuts, each encoded by itself."""
        ids: list[int] = []
        bounds = [0, *cuts, len(text)]
        for first in range(0, len(bounds) - 1, _PARTS_AT_ONCE):
            # Some tokenizers put a space before a text. Pieces after the first must not get it: a line break precedes
            # them during encoding instead.
            parts = [(_LINE if start else "", text[start:end]) for start, end in pairwise(bounds[first : first + _PARTS_AT_ONCE + 1])]
            encodings = self._backend.encode_batch_fast([line + part for line, part in parts], add_special_tokens=False)
            for encoding, (line, part) in zip(encodings, parts, strict=True):
                ids += self._without_line(encoding.ids, part) if line else encoding.ids
            if max_tokens is not None and len(ids) > max_tokens:
                raise TextTooLong(f"at least {len(ids)} tokens", max_tokens)
        return ids

    def _without_line(self, ids: list[int], part: str) -> list[int]:
        """Ids of a part that was encoded after a line break, without those of the line break."""
        line_ids = self._line_ids
        if ids[: len(line_ids)] == line_ids:
            return ids[len(line_ids) :]
        return self._backend.encode(part, add_special_tokens=False).ids  # the line break merged with the part

    @functools.cached_property
    def _line_ids(self) -> list[int]:
        return self._backend.encode(_LINE, add_special_tokens=False).ids

    @functools.cached_property
    def num_around(self) -> tuple[int, int]:
        """The number of special tokens that the model expects before a text and after it."""
        is_special = self._backend.encode("a").special_tokens_mask
        return is_special.index(0), is_special[::-1].index(0)

    def encode_prompt(self, text: str | PromptText, params: SamplingParams, max_model_len: int, *, add_special_tokens: bool) -> list[int]:
        """A prompt's token ids, truncated as `params` say. Raises as `encode` does for more than the context."""
        limit = max_model_len if params.truncate_prompt_tokens is None else None
        token_ids = self.encode(text, add_special_tokens, max_tokens=limit)
        return list(params.truncated(token_ids, max_model_len))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Invalid UTF-8 becomes U+FFFD; ids outside the vocabulary become nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def save(self, path: Path) -> None:
        """Write a tokenizer.json, which transformers reads."""
        self._backend.save(str(path))

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            # A token with any other character is an added one, spelled literally.
            return bytes(map(BYTES.__getitem__, token)) if all(map(BYTES.__contains__, token)) else token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace(SPACE, " ").encode()

    def _token_text(self, token_id: int) -> str | None:
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of special tokens, by their text."""
        return {token.content: i for i, token in self._backend.get_added_tokens_decoder().items() if token.special}

    @property
    def template_text(self) -> str:
        """The chat template as it is written, of several all; empty if there is none."""
        return self._template.text

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template may depend on `tools`."""
        return self._template.reads_tools

    def template_reads(self, variable: str) -> bool:
        """Whether the chat template may depend on this variable of `chat_template_kwargs`."""
        return self._template.reads(variable)

    def template_mentions(self, name: str, tools: Sequence[Mapping[str, Any]] | None) -> bool:
        """Whether the name occurs in the chat template for these tools; also if there is none."""
        return self._template.mentions(name, tools)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> PromptText:
        """The prompt of a conversation, by the model's template. Encode it with `add_special_tokens=False`: the
        template writes them.

        `add_generation_prompt`: whether it ends where an answer begins; by default, unless the last message is to be
        continued. `tools`, `documents` and `continue_final_message`: see `ChatTemplate.render`. `chat_template_kwargs`:
        further variables of the template, such as enable_thinking. Message text never becomes a control token: `encode`
        reads `<|im_end|>` in a message as any other text. Raises `RequestError` for a model without a template, and for
        what the template refuses.
        """
        render = partial(
            self.render_text,
            messages,
            add_generation_prompt,
            tools=tools,
            documents=documents,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        text = render()
        marks = self._control_tokens.marks((messages, tools, documents, chat_template_kwargs))
        return PromptText(text) if marks is None else self._control_tokens.prompt(text, render(marks=marks), marks)

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool | None = None,
        *,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> str:
        """`render_chat`'s text alone, where control tokens in messages can't be told from the template's."""
        begins_answer = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        given |= {"continue_final_message": continue_final_message, "variables": chat_template_kwargs}
        return self._template.render(messages, begins_answer, **given)

    @functools.cached_property
    def _control_tokens(self) -> ControlTokens:
        """Special tokens and others that the template writes. An assistant's message may contain the latter, unless
        they begin turns."""
        added = self._backend.get_added_tokens_decoder().values()
        literals = self._template.literals
        # The others are for text, such as spaces and HTML tags.
        visible = {t.content for t in added if not t.special and _is_marker(t.content) and t.content in literals}
        turns = self._turn()
        answers = {token for token in visible if turns is not None and (token not in turns or _is_tag(token, visible))}
        return ControlTokens({t.content for t in added if t.special} | visible, answers)

    def _turn(self) -> str | None:
        """The prompt of empty turns; None if the template refuses them."""
        turns = [{"role": role, "content": ""} for role in ("user", "assistant", "user")]
        try:
            return self._template.render(turns, True)
        except RequestError:
            return None


def _is_tag(token: str, tokens: set[str]) -> bool:
    """Whether the token is one of a pair such as <think> and </think>."""
    name = token.removeprefix("<").removeprefix("/")
    return {f"<{name}", f"</{name}"} <= tokens


def _is_marker(token: str) -> bool:
    return not token[0].isalnum() and not token[-1].isalnum() and any(map(str.isalnum, token))
