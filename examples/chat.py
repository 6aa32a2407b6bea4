"""A conversation in the terminal; an empty line ends it: python examples/chat.py ["first question"]"""

import sys

from jaxinfer import LLM, SamplingParams

llm = LLM(model="default")
messages = [{"role": "system", "content": "You are a helpful assistant. Answer in one or two sentences."}]
questions = iter(sys.argv[1:] or (["Why is the sky blue?"] if not sys.stdin.isatty() else []))

while question := next(questions, "") or (sys.stdin.isatty() and input("you: ")):
    messages.append({"role": "user", "content": question})
    answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=80)).outputs[0].text
    messages.append({"role": "assistant", "content": answer})
    print(f"model: {answer}")
