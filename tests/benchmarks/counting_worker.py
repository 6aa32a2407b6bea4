"""A worker for the tests: answers each question with how many there have been, prints noise, fails when asked to."""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.worker import Answer, serve


def start() -> tuple[Answer, Callable[[Answer], Answer]]:
    print("noise on standard output")
    if sys.argv[1:] == ["broken"]:
        raise ValueError("no such model")
    asked: list[Answer] = []

    def answer(question: Answer) -> Answer:
        print("more noise")
        if question.get("exit"):
            sys.exit("gone")
        asked.append(question)
        return {"asked": len(asked), "question": question}

    return {"name": "counter"}, answer


if __name__ == "__main__":
    serve(start)
