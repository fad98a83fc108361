// A shared to-do list in a web page, on the npm client `insieme`, unmodified. What is done is in its database
// (IndexedDB), and on the screen, at once; whether there is a server makes no difference but for the mark beside it.
import { createBrowserWebSocketTransport, createIndexedDbClientStore, createSyncClient } from "insieme/browser";
import { withPending } from "./model.mjs";

const PAUSE_MS = 500;
const asked = new URLSearchParams(location.search);
const server = asked.get("server") ?? "http://127.0.0.1:7171";
const name = asked.get("name") ?? "eve";
const list = asked.get("list") ?? "home";
const element = (id) => document.getElementById(id);

const rejected = new Map();
let isOff = false; // switched off by the user
let isLive = false;
let last = 0;

const store = createIndexedDbClientStore({ dbName: `todo-${list}-${name}` });
const transport = createBrowserWebSocketTransport({
  url: `${server.replace(/^http/, "ws")}/v1/events`,
  logger: ({ event }) => event === "socket_closed" && lost(),
});
const client = createSyncClient({
  transport,
  store,
  token: "",
  clientId: name,
  projectId: list,
  onEvent: ({ type, payload }) => {
    if (type === "synced") isLive = true;
    if (type === "rejected") rejected.set(payload.id, payload.errors?.[0]?.message ?? payload.reason);
    if (type === "error") lost();
    show();
  },
});

// --- the network

// The package does not notice by itself that a connection was lost while it waits for an answer. So it is stopped and
// started again, which sends what has no answer once more, under the same ids.
let connecting = null;

const connect = async () => {
  while (!isOff) {
    try {
      await client.stop();
      await client.start();
      return;
    } catch {
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
  }
};

const lost = () => {
  isLive = false;
  show();
  connecting ??= new Promise((resolve) => setTimeout(resolve, PAUSE_MS)).then(connect).finally(() => {
    connecting = null;
  });
};

const switchNetwork = async () => {
  isOff = !isOff;
  isLive = false;
  if (isOff) await client.stop();
  else lost();
  show();
};

// --- what is shown

let shown = Promise.resolve();
let isAsked = false;

// At most one more time than it is being done: whatever has happened by then is in it.
const show = () => {
  if (isAsked) return shown;
  isAsked = true;
  shown = shown.then(draw).catch((error) => {
    element("status").textContent = String(error);
  });
  return shown;
};

const draw = async () => {
  isAsked = false;
  // In this order: what is committed in between is in both, which does no harm, and not in neither.
  const drafts = await store.loadDraftsOrdered();
  const committed = await store.listCommitted();
  last = committed.at(-1)?.committedId ?? 0;
  element("title").textContent = `${list}: ${name}`;
  element("items").replaceChildren(
    ...withPending(committed, drafts).map(line),
    ...[...rejected].map(([id, why]) => rejectedLine(id, why)),
  );
  const state = isOff ? "○ switched off" : isLive ? "● live" : "○ offline";
  element("status").textContent = `${state} · event ${last}${drafts.length ? ` · ${drafts.length} waiting` : ""}`;
  element("offline").textContent = isOff ? "Go online" : "Go offline";
};

const made = (tag, className, text = "") => Object.assign(document.createElement(tag), { className, textContent: text });

const line = (item) => {
  const li = made("li", item.isDone ? "done" : "");
  li.dataset.id = item.id;
  li.dataset.place = item.place;
  const box = Object.assign(made("input", "box"), { type: "checkbox", checked: item.isDone });
  box.onchange = () => submit(box.checked ? "todo.done" : "todo.undone", { item: item.id });
  const remove = made("button", "remove", "✕");
  remove.onclick = () => submit("todo.removed", { item: item.id });
  li.append(box, made("span", "text", item.text), made("span", "by", item.by));
  if (item.isPending) li.append(made("span", "waits", "… not sent yet"));
  li.append(remove);
  return li;
};

const rejectedLine = (id, why) => {
  const li = made("li", "rejected", `✗ ${why}`);
  const seen = made("button", "remove", "✕");
  seen.onclick = () => rejected.delete(id) && show();
  li.append(seen);
  return li;
};

// --- what is done

const submit = async (type, payload) => {
  await client.submitEvent({ partition: `todo/${list}`, type, schemaVersion: 1, payload: { ...payload, by: name } });
  await show();
};

element("add").onsubmit = (event) => {
  event.preventDefault();
  const text = element("new").value.trim();
  element("new").value = "";
  if (text) submit("todo.added", { item: crypto.randomUUID(), text });
};
element("offline").onclick = switchNetwork;

await store.init();
await show();
await connect();
