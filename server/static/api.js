// Requests to the server this page came from.

export class ApiError extends Error {}

const headers = (key) => ({ "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) });

export async function getJson(path, key) {
  const response = await fetch(path, { headers: headers(key), cache: "no-store" });
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

// Yields the chunks of a streamed chat completion. Aborting `signal` closes the connection, and the server drops the request.
export async function* streamChat(body, key, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(key), signal,
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  if (!response.ok) throw await errorOf(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("the connection ended before the answer did");
    unread += value;
    const events = unread.split("\n\n");
    unread = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message);
      yield chunk;
    }
  }
}

async function errorOf(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `${response.status} ${response.statusText}`;
  const wait = body?.error?.code === "starting" ? null : response.headers.get("Retry-After"); // it says so itself
  const text = response.status === 401 ? `${message} (see Settings)` : wait ? `${message} (try again in ${wait} s)` : message;
  return Object.assign(new ApiError(text), { code: body?.error?.code });
}
