// A simulated world for the page's protocol, without a browser: an in-memory chat server that follows the rules, pages
// with their stores, and a network between them, on a simulated clock.
const PAGE = process.env.CHAT_PAGE;
export const { Protocol } = await import(`${PAGE}/protocol.mjs`);
export const { Line, fate, BAD, GOOD } = await import(`${PAGE}/network.mjs`);
export const { entriesOf, markText } = await import(`${PAGE}/entries.mjs`);
export const { Room, audit, fingerprint } = await import(`${PAGE}/room.mjs`);

// Seeded random numbers (mulberry32).
export const chance = (seed) => () => {
  seed = (seed + 0x6d2b79f5) | 0;
  let mixed = Math.imul(seed ^ (seed >>> 15), 1 | seed);
  mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
  return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
};

export class Clock {
  constructor() {
    this.now = 1_000_000;
    this.queue = [];
    this.count = 0;
  }

  later(what, ms) {
    this.count += 1;
    this.queue.push({ at: this.now + ms, order: this.count, what });
  }

  // Advance the clock until the condition holds; return whether it does.
  run(condition, maxMs = 600_000) {
    const end = this.now + maxMs;
    while (!condition()) {
      this.queue.sort((a, b) => a.at - b.at || a.order - b.order);
      const next = this.queue.shift();
      if (!next || next.at > end) return false;
      this.now = Math.max(this.now, next.at);
      next.what();
    }
    return true;
  }

  pass(ms) {
    const end = this.now + ms;
    this.later(() => {}, ms);
    this.run(() => this.now >= end);
  }
}

// The server: members, one sequence per chat, each id once. Its chats survive `restart`; its connections do not.
export class Server {
  constructor(clock) {
    this.clock = clock;
    this.epoch = "epoch-1";
    this.chats = new Map();
    this.sessions = new Set();
    this.isUp = true;
    this.log = [];
  }

  chat(chatId, ...names) {
    const chat = this.chats.get(chatId) ?? { messages: [], keys: new Map(), members: new Map() };
    this.chats.set(chatId, chat);
    for (const name of names) if (!chat.members.has(`user:${name}`)) chat.members.set(`user:${name}`, 0);
    return chat;
  }

  stop() {
    this.isUp = false;
    for (const session of [...this.sessions]) session.close();
  }

  restart() {
    this.isUp = true;
  }

  list(user) {
    return [...this.chats]
      .filter(([, chat]) => chat.members.has(user))
      .map(([chat_id, chat]) => ({
        chat_id,
        last_sequence: chat.messages.length,
        last_acked_sequence: chat.members.get(user),
      }));
  }

  members(chatId) {
    const members = this.chats.get(chatId)?.members ?? new Map();
    return [...members].map(([user_id, last_acked_sequence]) => ({ user_id, last_acked_sequence }));
  }

  tell(chatId, frame, but = null) {
    const { members } = this.chats.get(chatId);
    for (const one of this.sessions) if (one !== but && members.has(one.user)) one.send(frame);
  }

  receive(session, frame) {
    this.log.push(frame);
    const answer = (type, fields) => session.send({ type, request_id: frame.request_id, ...fields });
    if (frame.type === "connect") {
      if (session.user) return answer("error", { code: "INVALID_REQUEST", message: "connected already" });
      session.user = `user:${frame.token}`;
      return answer("connected", { user_id: session.user, epoch: this.epoch, heartbeat_ms: 30_000 });
    }
    if (!session.user) return session.close();
    if (frame.type === "ping") return answer("pong", {});
    const chat = this.chats.get(frame.chat_id);
    const { chat_id, client_message_id } = frame;
    if (!chat?.members.has(session.user)) {
      return answer("error", { code: "NOT_A_MEMBER", message: "not a member", chat_id, client_message_id });
    }
    if (frame.type === "sync_request") {
      const { last_acked_sequence: from, limit } = frame;
      const messages = chat.messages.filter((message) => message.sequence > from).slice(0, limit);
      const next_sequence = messages.at(-1)?.sequence ?? from;
      const last_sequence = chat.messages.length;
      const has_more = next_sequence < last_sequence;
      const ahead = from > last_sequence ? { cursor_ahead: true } : {};
      return answer("message_batch", { chat_id, messages, has_more, next_sequence, last_sequence, ...ahead });
    }
    if (frame.type === "ack") {
      const acked = Math.max(chat.members.get(session.user), frame.last_acked_sequence);
      if (acked > chat.messages.length) return answer("error", { code: "INVALID_ACK", message: "beyond", chat_id });
      chat.members.set(session.user, acked);
      return this.tell(chat_id, { type: "delivery", chat_id, user_id: session.user, last_acked_sequence: acked });
    }
    const known = chat.keys.get(client_message_id);
    const message = known ?? this.#commit(chat, session.user, frame);
    const { message_id, sequence, created_at } = message;
    const isDuplicate = known !== undefined;
    answer("send_message_ack", { chat_id, client_message_id, message_id, sequence, created_at, duplicate: isDuplicate });
    if (!isDuplicate) this.tell(chat_id, { type: "message", ...message }, session);
  }

  #commit(chat, sender_id, { chat_id, client_message_id, content }) {
    const sequence = chat.messages.length + 1;
    const message = {
      message_id: `msg_${chat_id}_${sequence}`,
      chat_id,
      sequence,
      sender_id,
      client_message_id,
      content,
      content_type: "text/plain",
      created_at: new Date(this.clock.now).toISOString(),
    };
    chat.messages.push(message);
    chat.keys.set(client_message_id, message);
    return message;
  }
}

// A page: the protocol with a store that survives `reload`, and its network connection.
export class Page {
  constructor(world, name) {
    Object.assign(this, { world, name, kept: new Map(), rates: GOOD, run: 0, history: [] });
    this.reload();
  }

  reload() {
    const { world, name } = this;
    this.#drop();
    this.run += 1;
    const newId = () => `${name}-${(world.ids += 1)}`;
    this.protocol = new Protocol({ token: name, deviceId: name, random: world.random, newId });
    const of = (kind) => [...this.kept].filter(([key]) => key.startsWith(`${kind} `)).map(([, value]) => value);
    const messages = of("message");
    const rooms = of("room").map((room) => ({
      ...room,
      messages: messages.filter((message) => message.chat_id === room.chat_id),
    }));
    this.protocol.restore({ epoch: this.kept.get("meta epoch") ?? null, rooms, outbox: of("outbox") });
    this.protocol.openRoom = "lobby";
    this.#tick(this.run);
  }

  #tick(run) {
    if (run !== this.run) return;
    this.do((protocol, now) => protocol.tick(now));
    this.world.clock.later(() => this.#tick(run), 50);
  }

  do(what) {
    const { clock } = this.world;
    const result = what(this.protocol, clock.now);
    const { frames, changes, wants } = this.protocol.take();
    for (const change of changes) this.#keep(change);
    for (const frame of frames) {
      this.history.push(frame);
      this.line?.[0].carry(frame);
    }
    for (const want of wants) this.#want(want);
    return result;
  }

  write(text, chatId = "lobby") {
    return this.do((protocol, now) => protocol.submit(chatId, text, now));
  }

  entries(chatId = "lobby") {
    return entriesOf(this.protocol, chatId);
  }

  texts(chatId = "lobby") {
    return this.entries(chatId).map(({ content }) => content);
  }

  #keep(change) {
    const { kind, chat_id: chatId } = change;
    if (kind === "meta") this.kept.set("meta epoch", change.value);
    else if (kind === "room") this.kept.set(`room ${chatId}`, structuredClone(change));
    else if (kind === "message") this.kept.set(`message ${change.message.chat_id} ${change.message.sequence}`, change.message);
    else if (kind === "outbox") this.kept.set(`outbox ${change.item.client_message_id}`, structuredClone(change.item));
    else if (kind === "sent") this.kept.delete(`outbox ${change.id}`);
    else if (kind === "forget") {
      for (const key of [...this.kept.keys()]) {
        if (key === `room ${chatId}` || key.startsWith(`message ${chatId} `)) this.kept.delete(key);
      }
    } else throw new Error(kind);
  }

  #want(want) {
    if (want === "connect") this.#connect();
    else if (want === "close") this.#drop();
    else {
      const { clock, server } = this.world;
      const { run } = this;
      clock.later(() => {
        if (!server.isUp || run !== this.run) return;
        const chatId = want.slice("members ".length);
        if (want === "chats") this.do((protocol, now) => protocol.listed(server.list(`user:${this.name}`), now));
        else this.do((protocol) => protocol.described(chatId, server.members(chatId)));
      }, 5);
    }
  }

  #connect() {
    const { clock, server, random } = this.world;
    if (!server.isUp) {
      clock.later(() => this.do((protocol, now) => protocol.lost(now)), 1);
      return;
    }
    const line = (deliver) =>
      new Line({
        rates: () => this.rates,
        deliver: (frame) => clock.later(() => deliver(structuredClone(frame)), 1),
        tell: () => {},
        random,
        now: () => clock.now,
        later: (what, ms) => clock.later(what, ms),
      });
    let isOpen = true;
    const incoming = line((frame) => isOpen && this.do((protocol, now) => protocol.received(frame, now)));
    const session = { send: (frame) => incoming.carry(frame), close: () => this.#drop() };
    const outgoing = line((frame) => isOpen && server.sessions.has(session) && server.receive(session, frame));
    server.sessions.add(session);
    this.line = [outgoing, incoming];
    this.hangUp = () => {
      isOpen = false;
      server.sessions.delete(session);
      outgoing.close();
      incoming.close();
    };
    clock.later(() => isOpen && this.do((protocol, now) => protocol.opened(now)), 1);
  }

  #drop() {
    if (!this.line) return;
    this.hangUp();
    this.line = null;
    this.do((protocol, now) => protocol.lost(now));
  }
}

export class World {
  constructor(seed = 1) {
    this.clock = new Clock();
    this.server = new Server(this.clock);
    this.random = chance(seed);
    this.ids = 0;
  }

  page(name) {
    return new Page(this, name);
  }
}
