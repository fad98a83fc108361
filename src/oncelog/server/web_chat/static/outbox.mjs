// What has been written and has no answer yet, in the order in which it was written. No I/O.
//
// A message keeps its id from the keystroke to the answer, through reloads and however often it is sent: that is what lets
// the server know it again. Of each chat one is under way at a time, so that they are committed in the order of writing.

export class Outbox {
  constructor() {
    this.items = [];
    this.notes = new Map(); // how each fared on this page, answered ones too: id → {attempts, isDuplicate}
  }

  restore(items) {
    this.items = items.sort((a, b) => a.place - b.place).map(fresh);
  }

  // A new message, as it is to be kept.
  write(id, chatId, content, now) {
    const place = (this.items.at(-1)?.place ?? 0) + 1;
    const written_at = new Date(now).toISOString();
    const item = { client_message_id: id, chat_id: chatId, content, written_at, place };
    this.items.push(fresh(item));
    return item;
  }

  find(id) {
    return this.items.find((item) => item.client_message_id === id);
  }

  of(chatId) {
    return this.items.filter((item) => item.chat_id === chatId);
  }

  remove(id) {
    const before = this.items.length;
    this.items = this.items.filter((item) => item.client_message_id !== id);
    return this.items.length < before;
  }

  // Those whose turn it is, in chats that `isReady`.
  due(now, isReady) {
    const busy = new Set();
    const found = [];
    for (const item of this.items) {
      if (item.failed || busy.has(item.chat_id)) continue;
      busy.add(item.chat_id);
      if (now >= item.dueAt && isReady(item.chat_id)) found.push(item);
    }
    return found;
  }

  sending(item, againAt) {
    item.attempts += 1;
    item.dueAt = againAt;
    const { attempts = 0, isDuplicate = false } = this.notes.get(item.client_message_id) ?? {};
    this.notes.set(item.client_message_id, { attempts: attempts + 1, isDuplicate });
  }

  answered(id, isDuplicate) {
    const note = this.notes.get(id);
    if (note && isDuplicate) note.isDuplicate = true;
  }

  // The connection is another one: everything may be sent at once.
  lost() {
    for (const item of this.items) item.dueAt = item.attempts = 0;
  }
}

// An item with what only this page needs to know of it.
const fresh = (item) => ({ ...item, dueAt: 0, attempts: 0 });

// An item as it is kept.
export const kept = ({ client_message_id, chat_id, content, written_at, place, failed }) => ({
  client_message_id,
  chat_id,
  content,
  written_at,
  place,
  ...(failed ? { failed } : {}),
});
