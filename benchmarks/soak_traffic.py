"""The requests of a soak: of every kind and length, valid and invalid, from clients that stay and clients that
disconnect."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.http_load import LoadOutcome, LoadRequest, RequestRecord

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PREFIXES = (48, 64, 96, 160)  # tokens that many prompts begin with
WORDS = ("the", "river", "under", "seven", "green", "quick", "house", "why", "sing", "12", "307", "(x)", "?", "é", "ü", "漢字", "🎉")
# Frequency of each kind, out of 100.
KINDS = {
    "stream": 32,
    "chat stream": 13,
    "whole": 11,
    "chat whole": 6,
    "several": 6,
    "sampled": 8,
    "deadline": 4,
    "leaves mid-stream": 8,
    "leaves early": 4,
    "half a body": 2,
    "bad": 6,
}
LEAVING = ("leaves mid-stream", "leaves early", "half a body")


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request and its allowed outcomes."""

    kind: str
    request: LoadRequest
    statuses: tuple[int, ...] = ()  # for an invalid request: the status it must get
    tier: str | None = None

    def is_right(self, record: RequestRecord) -> bool:
        """Whether it was answered, or refused for an allowed reason. A refusal is 429, nothing else."""
        match record.outcome:
            case LoadOutcome.ANSWERED:
                return self.kind != "bad"
            case LoadOutcome.REFUSED:
                return record.status == 429
            case LoadOutcome.REJECTED:
                return record.status in self.statuses or (self.kind == "deadline" and record.status == 408)
            case LoadOutcome.FAILED:  # inside a stream, whose status was sent before
                return self.kind == "deadline" and record.code == "timeout"
            case LoadOutcome.LEFT:
                return self.kind in LEAVING
        return False


class SoakTraffic:
    """An endless supply of requests, with token ids of a range. The same seed gives the same requests."""

    def __init__(self, model: str, max_model_len: int, max_body_bytes: int, token_ids: tuple[int, int], seed: int) -> None:
        self._model, self._limit, self._max_body = model, max_model_len, max_body_bytes
        self._low, self._end = token_ids
        self._rng = random.Random(seed)
        self._prefixes = [self._tokens(length) for length in PREFIXES]
        self._next_bad = 0

    def __iter__(self) -> Iterator[SentRequest]:
        kinds, weights = list(KINDS), list(KINDS.values())
        while True:
            yield self.make(self._rng.choices(kinds, weights)[0])

    def make(self, kind: str) -> SentRequest:
        """One request of a kind."""
        rng = self._rng
        tier = rng.choice((None, None, None, None, "default", "priority", "flex", "flex"))
        body = self._completion()
        if tier is not None:
            body["service_tier"] = tier
        match kind:
            case "stream":
                return self._streamed(kind, body, tier)
            case "chat stream":
                return self._streamed(kind, self._chat() | _tier(tier), tier, CHAT)
            case "whole":
                return SentRequest(kind, LoadRequest.of(COMPLETIONS, body), tier=tier)
            case "chat whole":
                return SentRequest(kind, LoadRequest.of(CHAT, self._chat() | _tier(tier)), tier=tier)
            case "several":
                more = {"n": rng.randint(2, 4), "temperature": 0.8, "seed": rng.randrange(2**31)}
                return self._streamed(kind, body | more, tier)
            case "sampled":
                return self._streamed(kind, body | self._sampling(), tier)
            case "deadline":
                made = self._streamed(kind, body | {"timeout": round(rng.uniform(0.2, 8.0), 2)}, tier)
                return (
                    made
                    if rng.random() < 0.5
                    else SentRequest(kind, LoadRequest.of(COMPLETIONS, json.loads(made.request.body) | _WHOLE), tier=tier)
                )
            case "leaves mid-stream":
                made = self._streamed(kind, body | {"max_tokens": self._log_uniform(16, self._limit // 4)}, tier)
                return replace(made, request=replace(made.request, disconnects_after=rng.randint(1, 12)))
            case "leaves early":
                return SentRequest(kind, LoadRequest.of(COMPLETIONS, body, disconnects_at=rng.uniform(0.0, 3.0)), tier=tier)
            case "half a body":
                return SentRequest(
                    kind, LoadRequest.of(COMPLETIONS, body, sends_partial_body=True, disconnects_at=rng.uniform(0.05, 1.0)), tier=tier
                )
            case "bad":
                self._next_bad += 1
                return self.bad()[self._next_bad % len(self.bad())]
        raise AssertionError(kind)

    def bad(self) -> list[SentRequest]:
        """One of each invalid request."""
        good: dict[str, Any] = {"model": self._model, "prompt": [self._low] * 8, "max_tokens": 4}
        bodies: list[dict[str, Any]] = [
            {"prompt": []},
            {"prompt": [10**7]},
            {"prompt": [-1]},
            {"prompt": [self._low] * (self._limit + 1)},
            {"prompt": {"text": "x"}},
            {"max_tokens": -1},
            {"max_tokens": "many"},
            {"temperature": -0.5},
            {"top_p": 0},
            {"n": 0},
            {"n": 10**6},
            {"stop": [1]},
            {"logprobs": 10**6},
            {"logit_bias": {"x": 1}},
            {"seed": 1.5},
            {"service_tier": "gold"},
            {"timeout": -1},
            {"tempreature": 1},
        ]
        made = [SentRequest("bad", LoadRequest.of(COMPLETIONS, good | wrong), (400,)) for wrong in bodies]
        chats: list[list[Any]] = [[], [{"role": 1, "content": "x"}], [{"role": "user"}], ["hello"]]
        made += [SentRequest("bad", LoadRequest.of(CHAT, {"model": self._model, "messages": messages}), (400,)) for messages in chats]
        raw = (b"", b"{", b"[1, 2", b"null", b'"prompt"', b"\xff\xfe", b'{"model": "\\ud83d"', b"[" * 50_000)
        made += [SentRequest("bad", LoadRequest(COMPLETIONS, body), (400,)) for body in raw]
        made.append(SentRequest("bad", LoadRequest(COMPLETIONS, json.dumps(good).encode(), headers={"Content-Type": "text/plain"}), (400,)))
        made.append(SentRequest("bad", LoadRequest.of(COMPLETIONS, good | {"model": "no-such-model"}), (404,)))
        made.append(SentRequest("bad", LoadRequest.of("/v1/no-such-path", good), (404,)))
        made.append(SentRequest("bad", LoadRequest.of("/v1/models", good), (405,)))
        made.append(SentRequest("bad", LoadRequest(COMPLETIONS, b'{"prompt": "' + b"x" * self._max_body + b'"}'), (413,)))
        return made

    def _completion(self) -> dict[str, Any]:
        rng = self._rng
        prompt = self._tokens(self._log_uniform(8, self._limit // 2))
        if rng.random() < 0.3:
            prompt = (rng.choice(self._prefixes) + prompt)[: self._limit // 2]
        max_tokens = self._log_uniform(4, max(self._limit // 10, 5))
        if rng.random() < 0.02:  # as long as allowed
            max_tokens = min(self._limit // 3, self._limit - len(prompt))
        return {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}

    def _chat(self) -> dict[str, Any]:
        turns = [
            {"role": role, "content": " ".join(self._rng.choices(WORDS, k=self._log_uniform(4, max(self._limit // 32, 5))))}
            for role in ("system", "user", "assistant", "user")[: self._rng.randint(2, 4)]
        ]
        return {"model": self._model, "messages": turns, "max_tokens": self._log_uniform(4, max(self._limit // 10, 5)), "temperature": 0.7}

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        asked: list[dict[str, Any]] = [
            {"logprobs": rng.randint(0, 5)},
            {"top_p": 0.9, "top_k": 40},
            {"repetition_penalty": 1.2, "presence_penalty": 0.5},
            {"min_p": 0.05, "frequency_penalty": 0.5},
            {"stop": ["\n\n", " the"], "ignore_eos": False},
            {"logit_bias": {str(self._low): 5.0}, "min_tokens": 3},
        ]
        return {"temperature": rng.uniform(0.3, 1.5), "seed": rng.randrange(2**31)} | rng.choice(asked)

    def _streamed(self, kind: str, body: dict[str, Any], tier: str | None, path: str = COMPLETIONS) -> SentRequest:
        return SentRequest(kind, LoadRequest.of(path, body | {"stream": True, "stream_options": {"include_usage": True}}), tier=tier)

    def _tokens(self, length: int) -> list[int]:
        return [self._rng.randrange(self._low, self._end) for _ in range(length)]

    def _log_uniform(self, low: int, high: int) -> int:
        """Many short, few long."""
        return round(math.exp(self._rng.uniform(math.log(low), math.log(max(high, low)))))


_WHOLE: dict[str, Any] = {"stream": None, "stream_options": None}


def _tier(tier: str | None) -> dict[str, str]:
    return {} if tier is None else {"service_tier": tier}
