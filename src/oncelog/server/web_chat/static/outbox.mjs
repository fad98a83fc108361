// Unanswered messages, in the order in which the visitor wrote them. No I/O.
//
// A message keeps its id until it is answered, across reloads and retries, so that the server recognises retries. The outbox
// sends one message per chat at a time, so that the server commits the messages in the order in which they were written.

export class Outbox {
  constructor() {
    this.items = [];
    this.notes = new Map(); // id → {attempts, isDuplicate} of each message on this page, kept after the answer
  }

  restore(items) {
    this.items = items.sort((a, b) => a.place - b.place).map(fresh);
  }

  // Add a new message, and return it in the form in which it is stored.
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

  // Return the messages to send now, at most one for each chat that `isReady`.
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

  // After a connection is lost, make all messages due immediately.
  lost() {
    for (const item of this.items) item.dueAt = item.attempts = 0;
  }
}

// Add the unstored state to an item.
const fresh = (item) => ({ ...item, dueAt: 0, attempts: 0 });

// Return an item in the form in which it is stored.
export const kept = ({ client_message_id, chat_id, content, written_at, place, failed }) => ({
  client_message_id,
  chat_id,
  content,
  written_at,
  place,
  ...(failed ? { failed } : {}),
});
