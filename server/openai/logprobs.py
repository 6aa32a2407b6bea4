"""Log-probabilities in the formats of OpenAI's two APIs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from jaxinfer.request import TokenLogprob
from jaxinfer.tokenizer import Tokenizer
from server.openai.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, PromptLogprob, TopLogprob

LEAST_LOGPROB = -9999.0  # represents minus infinity, which JSON doesn't have


@dataclass(frozen=True, slots=True)
class TokenNames:
    """A token's name in log-probabilities: its text or, for a token without text of its own, its id."""

    tokenizer: Tokenizer
    are_ids: bool = False

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.are_ids else token_text(self.tokenizer.token_bytes(token_id))


def prompt_logprobs_by_id(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None], num_top: int
) -> list[dict[str, PromptLogprob] | None]:
    """For each token of a prompt its own and those of the `num_top` likeliest; None for the first, which nothing
    predicts."""

    def of_token(entry: TokenLogprob) -> dict[str, PromptLogprob]:
        likeliest = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:num_top], 1)]
        told: dict[str, PromptLogprob] = {}
        for token_id, logprob, rank in ((entry.token_id, entry.logprob, entry.rank), *likeliest):
            text = token_text(tokenizer.token_bytes(token_id))
            told.setdefault(str(token_id), PromptLogprob(logprob=max(logprob, LEAST_LOGPROB), rank=rank, decoded_token=text))
        return told

    return [None if entry is None else of_token(entry) for entry in entries]


def chat_logprobs(name: TokenNames, entries: Iterable[TokenLogprob], num_top: int) -> ChatLogprobs:
    """Each token's name, bytes and log-probability, with those of the `num_top` likeliest."""

    def fields(token_id: int, logprob: float) -> dict[str, object]:
        token = name.tokenizer.token_bytes(token_id)
        return {"token": name(token_id), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(token)}

    return ChatLogprobs(
        refusal=None,
        content=[
            ChatTokenLogprob(
                **fields(entry.token_id, entry.logprob),  # type: ignore[arg-type]
                top_logprobs=[TopLogprob(**fields(*top)) for top in entry.top[:num_top]],  # type: ignore[arg-type]
            )
            for entry in entries
        ],
    )


class CompletionLogprobsWriter:
    """Writes one sequence's log-probabilities piece by piece, and counts the characters that came before."""

    def __init__(self, name: TokenNames, num_top: int, skipped: Collection[int]) -> None:
        """`skipped`: tokens that the text omits."""
        self._name, self._num_top, self._skipped = name, num_top, skipped
        self._num_characters = 0

    def write(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> CompletionLogprobs:
        """The next tokens of the sequence. An entry is None for a prompt's first token, which nothing predicts."""
        written = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, entry in zip(token_ids, entries, strict=True):
            written.tokens.append(self._name(token_id))
            written.token_logprobs.append(None if entry is None else max(entry.logprob, LEAST_LOGPROB))
            written.top_logprobs.append(None if entry is None else self._top(entry))
            written.text_offset.append(self._offset(token_id))
        return written

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """By token text, best first; the sampled token is among them though it may not be one of the likeliest."""
        ranked = [*entry.top[: self._num_top], (entry.token_id, entry.logprob)]
        top: dict[str, float] = {}
        for token_id, logprob in ranked:
            top.setdefault(self._name(token_id), max(logprob, LEAST_LOGPROB))
        return top

    def _offset(self, token_id: int) -> int:
        """Where the token starts in the text. One that starts inside a character has that character's offset."""
        if token_id in self._skipped:
            return self._num_characters
        token = self._name.tokenizer.token_bytes(token_id)
        starts_inside = bool(token) and _continues(token[0]) and self._num_characters > 0
        offset = self._num_characters - starts_inside
        self._num_characters += sum(not _continues(byte) for byte in token)
        return offset


def token_text(token: bytes) -> str:
    """A token as text; one that is part of a character as 'bytes:\\xf0\\x9f', as OpenAI writes it."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80
