// Sends a request and shows the answer. A stream is shown as it arrives, until the reader stops it.
import { el } from "./dom.mjs";
import { formatJson } from "./format.mjs";

const CHARACTERS_MAX = 200_000;
const SHOWN_HEADERS = ["content-type", "retry-after", "etag", "allow", "www-authenticate", "cache-control"];

const isJson = (response) => /json/.test(response.headers.get("content-type") ?? "");

const cut = (text) => (text.length <= CHARACTERS_MAX ? text : `${text.slice(0, CHARACTERS_MAX)}\n… (${text.length} characters)`);

const headersOf = (response) =>
  SHOWN_HEADERS.filter((name) => response.headers.has(name)).map((name) => `${name}: ${response.headers.get(name)}`).join("\n");

const follow = async (response, body) => {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    body.textContent = (body.textContent + value).slice(-CHARACTERS_MAX);
  }
};

export const send = async (request, output, stopButton) => {
  const state = el("p", { role: "status" }, "Waiting for the answer …");
  const head = el("pre", { className: "head" });
  const body = el("pre", { tabIndex: 0, className: "body", "aria-label": "Answer" });
  output.replaceChildren(state);
  const stop = new AbortController();
  stopButton.hidden = false;
  stopButton.onclick = () => stop.abort();
  const startedMs = performance.now();
  try {
    // The path begins with a slash. The page may be below a path of a proxy, so it is resolved against the page.
    const response = await fetch(`.${request.path}`, {
      method: request.method, headers: request.headers, body: request.body, signal: stop.signal,
      credentials: "omit", cache: "no-store", redirect: "error",
    });
    const tookMs = Math.round(performance.now() - startedMs);
    state.textContent = `${response.status} ${response.statusText} after ${tookMs} ms`;
    state.dataset.good = response.ok ? "yes" : "no";
    head.textContent = headersOf(response);
    output.replaceChildren(state, head, body);
    if (/event-stream/.test(response.headers.get("content-type") ?? "")) await follow(response, body);
    else {
      const text = await response.text();
      body.textContent = cut(isJson(response) ? formatJson(text) : text);
    }
  } catch (error) {
    if (stop.signal.aborted) state.textContent += " · stopped";
    else {
      state.dataset.good = "no";
      state.textContent = `No answer: ${error.message}`;
    }
  } finally {
    stopButton.hidden = true;
  }
};
