"""The official OpenAI client with a local server: pip install openai; python examples/openai_client.py"""

import subprocess
import sys
import time
import urllib.error
import urllib.request

from openai import OpenAI

PORT = 8017
server = subprocess.Popen([sys.executable, "-m", "server.cli", "serve", "--port", str(PORT)])
try:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready")
            break
        except (urllib.error.URLError, ConnectionError):  # not listening yet, or 503 until every program is compiled
            time.sleep(0.5)

    client = OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="unused")
    model = client.models.list().data[0].id
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name three primary colours."}],
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        print(chunk.choices[0].delta.content or "" if chunk.choices else f"\n{chunk.usage}", end="", flush=True)

    done = client.completions.create(model=model, prompt="The capital of France is", max_tokens=5, temperature=0, logprobs=2)
    print(f"\n{done.choices[0].text!r} {done.choices[0].logprobs}")
finally:
    server.terminate()
    server.wait()
