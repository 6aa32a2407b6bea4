// The conversation, its settings, and the button that stops an answer.

import { ApiError, getJson, streamChat } from "./api.js";
import { formatSeconds, startLive } from "./live.js";
import { make, renderMarkdown } from "./render.js";

const element = (id) => document.getElementById(id);
const SUGGESTIONS = ["Why is the sky blue?", "Write a haiku about GPUs", "Write a Python function that reverses a string"];
const SETTINGS = ["system", "temperature", "top_p", "top_k", "max_tokens", "seed", "repetition_penalty"];
let messages = []; // {role, content}, as the API takes them; a new chat begins a new list
let model = null;
let answering = null; // the AbortController of the answer under way

// Settings: kept in the browser, the key only until its tab closes.

function loadSettings() {
  const saved = JSON.parse(localStorage.getItem("jaxinfer") ?? "{}");
  for (const id of SETTINGS) if (id in saved) element(id).value = saved[id];
  element("key").value = sessionStorage.getItem("jaxinfer-key") ?? "";
  showRanges();
}

function saveSettings() {
  localStorage.setItem("jaxinfer", JSON.stringify(Object.fromEntries(SETTINGS.map((id) => [id, element(id).value]))));
  sessionStorage.setItem("jaxinfer-key", element("key").value);
  showRanges();
}

function showRanges() {
  for (const output of document.querySelectorAll("label output")) output.value = Number(element(output.htmlFor.value).value).toFixed(2);
}

function sampling() {
  const fields = SETTINGS.filter((id) => id !== "system" && element(id).value !== "" && element(id).checkValidity());
  return Object.fromEntries(fields.map((id) => [id, Number(element(id).value)]));
}

// Messages

function addMessage(role) {
  element("welcome").hidden = true;
  const message = make("article", `message ${role}`), text = make("div", "text");
  message.append(text);
  element("messages").append(message);
  return { message, text };
}

function isAtEnd() {
  const box = element("messages");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
}

function scrollToEnd() {
  element("messages").scrollTop = element("messages").scrollHeight;
}

async function ask(question) {
  const conversation = messages; // stays this one's though a new chat may begin before the answer ends
  conversation.push({ role: "user", content: question });
  addMessage("user").text.append(question);
  const { message, text } = addMessage("assistant");
  scrollToEnd();
  const system = element("system").value.trim();
  const body = { model, messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation], ...sampling() };
  const sent = performance.now();
  let answer = "", first = null, last = null, usage = null, reason = null, isDrawn = true;

  const draw = () => {
    const follow = isAtEnd();
    text.replaceChildren(renderMarkdown(answer));
    isDrawn = true;
    if (follow) scrollToEnd();
  };
  setAnswering(new AbortController());
  message.classList.add("writing");
  try {
    for await (const chunk of streamChat(body, element("key").value, answering.signal)) {
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      reason = choice?.finish_reason ?? reason;
      if (!choice?.delta.content) continue;
      last = performance.now();
      first ??= last;
      answer += choice.delta.content;
      if (isDrawn) {
        isDrawn = false; // at most one redraw a frame, however fast the tokens come
        requestAnimationFrame(draw);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else message.append(make("div", "note error", error instanceof ApiError ? error.message : `the server can't be reached: ${error.message}`));
  }
  draw();
  message.classList.remove("writing");
  if (answer) {
    conversation.push({ role: "assistant", content: answer });
    message.append(make("div", "note", describe({ usage, reason, sent, first, last })));
  } else {
    conversation.pop(); // unanswered: it can be asked again
    if (reason === "stopped") message.append(make("div", "note", "stopped"));
  }
  setAnswering(null);
  if (isAtEnd()) scrollToEnd();
}

function describe({ usage, reason, sent, first, last }) {
  const parts = [`first token ${formatSeconds((first - sent) / 1000)}`];
  if (usage) {
    const { completion_tokens: count, prompt_tokens_details: details } = usage;
    if (last > first) parts.push(`${((1000 * (count - 1)) / (last - first)).toFixed(1)} tokens/s`);
    parts.push(`${usage.prompt_tokens} tokens in${details.cached_tokens ? ` (${details.cached_tokens} cached)` : ""}, ${count} out`);
  }
  if (reason === "stopped") parts.push("stopped");
  if (reason === "length") parts.push("ended by the token limit");
  return parts.join(" · ");
}

function setAnswering(controller) {
  answering = controller;
  element("stop").hidden = !controller;
  element("send").hidden = Boolean(controller);
  showSendable();
  if (!controller) element("input").focus();
}

function showSendable() {
  element("send").disabled = !model || !element("input").value.trim();
}

function growInput() {
  const input = element("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  showSendable();
}

// On a narrow screen the numbers and settings take the conversation's place.
function showSide(isShown) {
  document.body.classList.toggle("shows-side", isShown);
  element("toggle-side").setAttribute("aria-expanded", String(isShown));
  element("toggle-side").textContent = isShown ? "Chat" : "Settings";
}

function submit() {
  const question = element("input").value.trim();
  if (!question || !model || answering) return;
  element("input").value = "";
  growInput();
  ask(question);
}

// Start

async function findModel() {
  try {
    const { data } = await getJson("v1/models", element("key").value);
    await showModels();
    model = element("models").value || data[0].id;
    const { max_model_len: context } = data.find(({ id }) => id === model) ?? data[0];
    element("model").textContent = `${model} · context of ${context.toLocaleString()} tokens`;
  } catch (error) {
    model = null;
    element("model").textContent = error instanceof ApiError ? error.message : "the server can't be reached";
    if (!(error instanceof ApiError) || error.code === "starting") setTimeout(findModel, 1000);
  }
  showSendable();
}

// Where the server has several models: one to choose from.
async function showModels() {
  const { models } = await getJson("stats", element("key").value).catch(() => ({})), select = element("models");
  const names = Object.keys(models ?? {}), chosen = select.value;
  select.replaceChildren(...names.map((name) => make("option", "", name)));
  if (names.includes(chosen)) select.value = chosen;
  select.hidden = names.length < 2;
}

element("models").addEventListener("change", findModel);
element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
element("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
element("input").addEventListener("input", growInput);
element("stop").addEventListener("click", () => answering?.abort());
document.addEventListener("keydown", (event) => event.key === "Escape" && answering?.abort());
element("new-chat").addEventListener("click", () => {
  answering?.abort();
  messages = [];
  showSide(false);
  element("messages").replaceChildren(element("welcome"));
  element("welcome").hidden = false;
});
element("toggle-side").addEventListener("click", () => showSide(!document.body.classList.contains("shows-side")));
element("side").addEventListener("input", saveSettings);
element("key").addEventListener("change", findModel);
element("reset").addEventListener("click", () => {
  for (const id of SETTINGS) element(id).value = element(id).defaultValue;
  saveSettings();
});
for (const suggestion of SUGGESTIONS) {
  const button = make("button", "", suggestion);
  button.type = "button";
  button.addEventListener("click", () => {
    element("input").value = suggestion;
    submit();
  });
  element("suggestions").append(button);
}
loadSettings();
growInput();
findModel();
startLive();
