// Stores a visitor's outbox, chats and messages in IndexedDB. Each name has a separate database, so that several visitors can
// share a browser.

const VERSION = 1;
export const KEPT = 1000; // messages stored per chat; the page can request older ones again

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const opened = async (name) => {
  const request = indexedDB.open(`oncelog-chat ${name}`, VERSION);
  request.onupgradeneeded = () => {
    const database = request.result;
    database.createObjectStore("meta");
    database.createObjectStore("rooms", { keyPath: "chat_id" });
    database.createObjectStore("messages", { keyPath: ["chat_id", "sequence"] });
    database.createObjectStore("outbox", { keyPath: "client_message_id" });
  };
  return done(request);
};

// Return the key range of a chat's messages, optionally only up to a sequence.
const ofChat = (chatId, upTo = Infinity) => IDBKeyRange.bound([chatId, 0], [chatId, upTo]);

const WRITE = {
  meta: (tables, { key, value }) => tables.meta.put(value, key),
  room: (tables, { chat_id, cursor, floor, members }) => tables.rooms.put({ chat_id, cursor, floor, members }),
  message: (tables, { message }) => tables.messages.put(message),
  outbox: (tables, { item }) => tables.outbox.put(item),
  sent: (tables, { id }) => tables.outbox.delete(id),
  forget: (tables, { chat_id: chatId }) => {
    tables.rooms.delete(chatId);
    tables.messages.delete(ofChat(chatId));
  },
};
const TABLES = ["meta", "rooms", "messages", "outbox"];

export class Store {
  static async open(name) {
    return new Store(await opened(name));
  }

  constructor(database) {
    this.database = database;
  }

  // Load the state for `Protocol.restore`.
  async load() {
    const { tables } = this.#begin("readonly");
    const [epoch, deviceId, rooms, messages, outbox] = await Promise.all([
      done(tables.meta.get("epoch")),
      done(tables.meta.get("device")),
      done(tables.rooms.getAll()),
      done(tables.messages.getAll()),
      done(tables.outbox.getAll()),
    ]);
    const byChat = Map.groupBy(messages, (message) => message.chat_id);
    const restored = rooms.map((room) => newest(room, byChat.get(room.chat_id) ?? []));
    await this.#forgetBelow(restored);
    return { epoch: epoch ?? null, deviceId, rooms: restored, outbox };
  }

  // Save changes in one transaction, which is durable when the promise resolves.
  async save(changes) {
    const { transaction, tables } = this.#begin("readwrite");
    const finished = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    for (const change of changes) WRITE[change.kind](tables, change);
    await finished;
  }

  #begin(mode) {
    const transaction = this.database.transaction(TABLES, mode, { durability: "strict" });
    return { transaction, tables: Object.fromEntries(TABLES.map((name) => [name, transaction.objectStore(name)])) };
  }

  async #forgetBelow(rooms) {
    const { tables } = this.#begin("readwrite");
    const forget = ({ chat_id, cursor, floor, members }) => [
      done(tables.rooms.put({ chat_id, cursor, floor, members })),
      done(tables.messages.delete(ofChat(chat_id, floor))),
    ];
    await Promise.all(rooms.flatMap(forget));
  }
}

const newest = (room, messages) => {
  const floor = Math.max(room.floor, messages.length > KEPT ? messages.at(-KEPT - 1).sequence : 0);
  return { ...room, floor, messages: messages.filter((message) => message.sequence > floor) };
};
