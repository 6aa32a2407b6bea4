// The live numbers: polled from /stats while the page is visible.

import { getJson } from "./api.js";
import { make } from "./render.js";

const EVERY = 1000; // milliseconds
const KEPT = 60; // points of the curve: a minute
const element = (id) => document.getElementById(id);
const rates = [];
let before = null;

export function startLive() {
  const turn = async () => {
    if (!document.hidden) await update();
    setTimeout(turn, EVERY);
  };
  turn();
}

async function update() {
  let now;
  try {
    const chosen = element("models").value; // of several models; another one's counts begin elsewhere
    if (chosen !== before?.chosen) before = null;
    const path = chosen ? `stats?model=${encodeURIComponent(chosen)}` : "stats";
    now = { at: performance.now(), chosen, ...(await getJson(path, element("key").value)) };
  } catch (error) {
    before = null;
    return setState("bad", error.code === "starting" ? error.message : "no connection to the server");
  }
  setState("good", "connected");
  if (before && now.output_tokens >= before.output_tokens) {
    rates.push((1000 * (now.output_tokens - before.output_tokens)) / (now.at - before.at));
    rates.splice(0, rates.length - KEPT);
  }
  before = now;
  const rate = rates.at(-1) ?? 0;
  element("rate").value = rate < 10 ? rate.toFixed(1).replace(/\.0$/, "") : rate.toFixed(0);
  element("ttft").textContent = formatSeconds(now.time_to_first_token);
  element("itl").textContent = formatSeconds(now.inter_token_latency);
  element("running").textContent = now.running + now.prefilling;
  element("waiting").textContent = now.waiting;
  const compilations = element("compilations");
  compilations.textContent = now.compilations_after_ready;
  compilations.className = now.compilations_after_ready ? "bad" : "good";
  const where = element("where"); // gone with the first message
  if (now.cluster && where) where.textContent = "The workers of this cluster run it";
  showPages(now);
  drawCurve();
}

function setState(kind, title) {
  element("state").className = `dot ${kind}`;
  element("state").title = title;
}

function showPages({ pages, shares_pages, cluster }) {
  const workers = cluster?.workers.map((worker) => [
    `${worker.address}, ${worker.role}`, [worker.num_used_pages, worker.num_used_pages + worker.num_free_pages], `${worker.num_running} running`,
  ]);
  const meshes = workers ?? (shares_pages ? [["KV pages, both meshes", pages.decode]] : [["KV pages, prefill", pages.prefill], ["KV pages, decode", pages.decode]]);
  const bars = meshes.map(([name, [used, total], said]) => {
    const numbers = `${used.toLocaleString()} / ${total.toLocaleString()}`;
    const bar = make("div", "bar"), row = make("div"), meter = make("progress");
    row.append(make("span", "", name), make("span", "", said ?? numbers));
    bar.title = `${numbers} KV pages`;
    meter.max = Math.max(total, 1);
    meter.value = used;
    meter.setAttribute("aria-label", name);
    bar.append(row, meter);
    return bar;
  });
  element("pages").replaceChildren(...bars);
}

function drawCurve() {
  const top = Math.max(...rates, 1), width = 240 / (KEPT - 1), offset = KEPT - rates.length;
  const points = rates.map((rate, i) => `${((offset + i) * width).toFixed(1)},${(42 - (38 * rate) / top).toFixed(1)}`);
  if (!points.length) return;
  element("spark-line").setAttribute("d", `M${points.join("L")}`);
  element("spark-area").setAttribute("d", `M${(offset * width).toFixed(1)},44L${points.join("L")}L240,44Z`);
}

export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`;
}
