// A shared to-do list in a web page, on the unmodified npm client `insieme`. The page stores every change in its
// database (IndexedDB) and shows it immediately. Without a server, the only difference is the mark next to a pending
// item.
import { createBrowserWebSocketTransport, createIndexedDbClientStore, createSyncClient } from "insieme/browser";
import { buildListWithPending } from "./model.mjs";

const PAUSE_MS = 500;
const parameters = new URLSearchParams(location.search);
const server = parameters.get("server") ?? "http://127.0.0.1:7171";
const name = parameters.get("name") ?? "eve";
const list = parameters.get("list") ?? "home";
const element = (id) => document.getElementById(id);

const rejected = new Map();
let isOff = false; // switched off by the user
let isLive = false;
let last = 0;

const store = createIndexedDbClientStore({ dbName: `todo-${list}-${name}` });
const transport = createBrowserWebSocketTransport({
  url: `${server.replace(/^http/, "ws")}/v1/events`,
  logger: ({ event }) => event === "socket_closed" && reconnect(),
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
    if (type === "error") reconnect();
    show();
  },
});

// --- the network

// The package does not notice a connection that was lost while it waits for an answer. The page therefore stops and
// starts it again, which sends the unanswered events again under the same ids.
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

const reconnect = () => {
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
  else reconnect();
  show();
};

// --- the screen

let drawing = Promise.resolve();
let isDrawRequested = false;

// Draws the page once the drawing in progress is finished. Calls made until then share this next drawing, which shows
// everything that has happened before it begins.
const show = () => {
  if (isDrawRequested) return drawing;
  isDrawRequested = true;
  drawing = drawing.then(draw).catch((error) => {
    element("status").textContent = String(error);
  });
  return drawing;
};

const draw = async () => {
  isDrawRequested = false;
  // Load the drafts first: an event that commits in between is in both lists, which does no harm. In the other order,
  // the event could be in neither list.
  const drafts = await store.loadDraftsOrdered();
  const committed = await store.listCommitted();
  last = committed.at(-1)?.committedId ?? 0;
  element("title").textContent = `${list}: ${name}`;
  element("items").replaceChildren(
    ...buildListWithPending(committed, drafts).map(createLine),
    ...[...rejected].map(([id, why]) => createRejectedLine(id, why)),
  );
  const state = isOff ? "○ switched off" : isLive ? "● live" : "○ offline";
  element("status").textContent = `${state} · event ${last}${drafts.length ? ` · ${drafts.length} waiting` : ""}`;
  element("offline").textContent = isOff ? "Go online" : "Go offline";
};

const createElement = (tag, className, text = "") =>
  Object.assign(document.createElement(tag), { className, textContent: text });

const createLine = (item) => {
  const li = createElement("li", item.isDone ? "done" : "");
  li.dataset.id = item.id;
  li.dataset.place = item.place;
  const box = Object.assign(createElement("input", "box"), { type: "checkbox", checked: item.isDone });
  box.onchange = () => submit(box.checked ? "todo.done" : "todo.undone", { item: item.id });
  const remove = createElement("button", "remove", "✕");
  remove.onclick = () => submit("todo.removed", { item: item.id });
  li.append(box, createElement("span", "text", item.text), createElement("span", "by", item.by));
  if (item.isPending) li.append(createElement("span", "waits", "… not sent yet"));
  li.append(remove);
  return li;
};

const createRejectedLine = (id, why) => {
  const li = createElement("li", "rejected", `✗ ${why}`);
  const dismiss = createElement("button", "remove", "✕");
  dismiss.onclick = () => rejected.delete(id) && show();
  li.append(dismiss);
  return li;
};

// --- actions

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
