// The to-do list: what a log of events makes of it. It says the same as model.py, which has the reasons.

const KINDS = ["todo.added", "todo.renamed", "todo.done", "todo.undone", "todo.removed"];
const WITH_TEXT = ["todo.added", "todo.renamed"];
const SCHEMA_VERSION = 1;

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

// What an event says; null if it is none of ours.
const changeOf = ({ type, schemaVersion, payload }) => {
  if (schemaVersion !== SCHEMA_VERSION || !KINDS.includes(type) || !isObject(payload)) return null;
  const { item, text = "", by = "" } = payload;
  if (![item, text, by].every((value) => typeof value === "string") || !item) return null;
  if (WITH_TEXT.includes(type) && !text) return null;
  return { kind: type, item, text, by };
};

// What a change makes of the item that it is about.
const after = (item, { kind, item: id, text, by }, place) => {
  if (!item) {
    return kind === "todo.added" ? { id, place, text, by, isDone: false, isRemoved: false, isPending: false } : null;
  }
  if (item.isRemoved) return item;
  if (kind === "todo.renamed") return { ...item, text };
  if (kind === "todo.removed") return { ...item, isRemoved: true };
  if (kind === "todo.added") return item;
  return { ...item, isDone: kind === "todo.done" };
};

const visible = (items) => [...items.values()].filter((item) => !item.isRemoved).sort((a, b) => a.place - b.place);

// The order is that of the log, whatever the order is in which events came.
const folded = (committed) => {
  const items = new Map();
  for (const event of [...committed].sort((a, b) => a.committedId - b.committedId)) {
    const change = changeOf(event);
    const item = change && after(items.get(change.item), change, event.committedId);
    if (item) items.set(item.id, item);
  }
  return items;
};

// The list after committed events.
export const listed = (committed) => visible(folded(committed));

// The list as it will be if what waits is committed next. Those items are marked.
export const withPending = (committed, waiting) => {
  const items = folded(committed);
  let place = Math.max(0, ...[...items.values()].map((item) => item.place));
  for (const event of waiting) {
    const change = changeOf(event);
    if (!change) continue;
    place += 1;
    const item = after(items.get(change.item), change, place);
    if (item) items.set(item.id, { ...item, isPending: true });
  }
  return visible(items);
};
