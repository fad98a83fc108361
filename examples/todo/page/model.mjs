// The to-do list as a function of the events in a log. It is model.py in JavaScript; model.py explains the reasons.

const KINDS = ["todo.added", "todo.renamed", "todo.done", "todo.undone", "todo.removed"];
const WITH_TEXT = ["todo.added", "todo.renamed"];
const SCHEMA_VERSION = 1;

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

// Returns the content of an event, or null if it is not about an item.
const parseChange = ({ type, schemaVersion, payload }) => {
  if (schemaVersion !== SCHEMA_VERSION || !KINDS.includes(type) || !isObject(payload)) return null;
  const { item, text = "", by = "" } = payload;
  if (![item, text, by].every((value) => typeof value === "string") || !item) return null;
  if (WITH_TEXT.includes(type) && !text) return null;
  return { kind: type, item, text, by };
};

// Returns the item after a change.
const applyChange = (item, { kind, item: id, text, by }, place) => {
  if (!item) {
    return kind === "todo.added" ? { id, place, text, by, isDone: false, isRemoved: false, isPending: false } : null;
  }
  if (item.isRemoved) return item;
  if (kind === "todo.renamed") return { ...item, text };
  if (kind === "todo.removed") return { ...item, isRemoved: true };
  if (kind === "todo.added") return item;
  return { ...item, isDone: kind === "todo.done" };
};

const listVisible = (items) => [...items.values()].filter((item) => !item.isRemoved).sort((a, b) => a.place - b.place);

// Returns all items, including removed ones. Sorts the events by the order of the log.
const fold = (committed) => {
  const items = new Map();
  for (const event of [...committed].sort((a, b) => a.committedId - b.committedId)) {
    const change = parseChange(event);
    const item = change && applyChange(items.get(change.item), change, event.committedId);
    if (item) items.set(item.id, item);
  }
  return items;
};

// Returns the list after committed events.
export const buildList = (committed) => listVisible(fold(committed));

// Returns the list as if the server committed the pending events next. Items with pending changes are marked.
export const buildListWithPending = (committed, waiting) => {
  const items = fold(committed);
  let place = Math.max(0, ...[...items.values()].map((item) => item.place));
  for (const event of waiting) {
    const change = parseChange(event);
    if (!change) continue;
    place += 1;
    const item = applyChange(items.get(change.item), change, place);
    if (item) items.set(item.id, { ...item, isPending: true });
  }
  return listVisible(items);
};
