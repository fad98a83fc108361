// The client's side of the chat protocol, without I/O: frames, answers, times and keystrokes go in; frames to send, changes to
// keep and wishes come out (`take`). Whoever drives it keeps the changes before it sends the frames: what is sent must be
// known after a crash, and what is acknowledged as delivered must be there (CH-12).
import { Outbox, kept } from "./outbox.mjs";
import { Room } from "./room.mjs";

export const LIMITS = {
  connectMs: 3000, // until `connected` must have come
  silenceMs: 20_000, // a connection on which nothing comes for so long, though we ask, is dead
  probeMs: 2000, // how long the open chat may be quiet before it is asked whether that is so
  lookMs: 4000, // how often the list of chats and their members are looked at
  gapMs: 120, // how long a gap may be before we ask what is in it: what was overtaken comes by itself
  syncMs: 1200, // until a question without an answer is asked again
  sendMs: 500, // until a message without an answer is sent again; doubled each time, up to
  sendMsMax: 3000,
  pauseMs: 200, // before a new connection; doubled each time, up to
  pauseMsMax: 3000,
  history: 200, // messages of a chat that is new here
  page: 100,
};
const FINAL = new Set(["NOT_A_MEMBER", "INVALID_MESSAGE", "MESSAGE_TOO_LARGE", "INVALID_REQUEST"]);

export class Protocol {
  // `random` gives numbers from 0 to 1, `newId` UUIDs of version 4.
  constructor({ token, deviceId, random, newId, limits = {} }) {
    this.token = token;
    this.deviceId = deviceId;
    this.me = `user:${token}`; // as the server will say; what waits is shown before it has
    this.epoch = null;
    this.state = "offline"; // off, offline, connecting, catching up, live, refused
    this.problem = "";
    this.rooms = new Map();
    this.outbox = new Outbox();
    this.openRoom = null;
    this.limits = { ...LIMITS, ...limits };
    this.random = random;
    this.newId = newId;
    this.connectAt = 0; // the next time we try
    this.announcedMs = 0; // how long the server wants us to stay away
    this.failures = 0;
    this.since = 0;
    this.heardAt = 0;
    this.probedAt = 0;
    this.lookedAt = -Infinity;
    this.requests = 0;
  }

  #out = { frames: [], changes: [], wants: new Set() };

  // What is to be done: keep the changes, then send the frames; `wants` is to connect, to close, to look.
  take() {
    const taken = this.#out;
    this.#out = { frames: [], changes: [], wants: new Set() };
    return taken;
  }

  // What an earlier page has kept.
  restore({ epoch = null, rooms = [], outbox = [] }) {
    this.epoch = epoch;
    for (const room of rooms) this.rooms.set(room.chat_id, new Room(room.chat_id, room));
    this.outbox.restore(outbox);
  }

  // --- the connection

  switchOff() {
    this.state = "off";
    this.#forgetConnection();
    this.#out.wants.add("close");
  }

  switchOn(now) {
    if (this.state !== "off") return;
    this.state = "offline";
    this.failures = 0;
    this.connectAt = now;
  }

  hurry(now) {
    if (this.state === "offline") this.connectAt = now;
  }

  opened(now) {
    this.since = this.heardAt = now;
    this.#send({ type: "connect", token: this.token, device_id: this.deviceId });
  }

  lost(now) {
    if (["off", "refused", "offline"].includes(this.state)) return;
    this.state = "offline";
    this.#forgetConnection();
    this.failures += 1;
    const { pauseMs, pauseMsMax } = this.limits;
    this.connectAt = now + Math.max(this.announcedMs, this.#jittered(pauseMs, pauseMsMax, this.failures));
    this.announcedMs = 0;
  }

  get isConnected() {
    return this.state === "live" || this.state === "catching up";
  }

  #forgetConnection() {
    for (const room of this.rooms.values()) room.lost();
    this.outbox.lost();
  }

  #jittered(least, most, failures) {
    return Math.min(most, least * 2 ** (failures - 1)) * (0.75 + this.random() / 2);
  }

  // --- what the user does

  submit(chatId, content, now) {
    const item = this.outbox.write(this.newId(), chatId, content, now);
    this.#out.changes.push({ kind: "outbox", item });
    this.#flush(now);
    return item.client_message_id;
  }

  // Once more, a message that was refused. It keeps its id: perhaps it was taken after all.
  again(id, now) {
    const item = this.outbox.find(id);
    if (!item) return;
    Object.assign(item, { failed: undefined, dueAt: 0, attempts: 0 });
    this.#out.changes.push({ kind: "outbox", item: kept(item) });
    this.#flush(now);
  }

  // Chats or members have changed, by our own doing: not to wait for the server to tell.
  look() {
    this.#out.wants.add("chats");
    if (this.rooms.has(this.openRoom)) this.#out.wants.add(`members ${this.openRoom}`);
  }

  discard(id) {
    if (this.outbox.remove(id)) this.#out.changes.push({ kind: "sent", id });
  }

  // --- what the server says over HTTP

  // All chats of ours, with how far they and we are.
  listed(chats, now) {
    this.lookedAt = now;
    for (const { chat_id: chatId, last_sequence: last, last_acked_sequence: acked } of chats) {
      let room = this.rooms.get(chatId);
      if (!room) {
        const floor = Math.max(0, last - this.limits.history);
        room = new Room(chatId, { cursor: floor, floor });
        this.rooms.set(chatId, room);
        this.#keep(room);
        this.#out.wants.add(`members ${chatId}`);
      }
      this.#acked(room, this.me, acked);
      room.lastSequence = Math.max(room.lastSequence, last);
      if (this.isConnected && (!room.isCaughtUp || last > room.cursor)) this.#sync(room, now);
    }
    const ours = new Set(chats.map((chat) => chat.chat_id));
    for (const chatId of [...this.rooms.keys()].filter((one) => !ours.has(one))) this.#leave(chatId);
    this.#settle(now);
    this.#flush(now);
  }

  // Members of a chat, with the role of each and the last sequence that it has.
  described(chatId, members) {
    const room = this.rooms.get(chatId);
    if (!room) return;
    const present = new Set(members.map((member) => member.user_id));
    for (const user of [...room.members.keys()].filter((one) => !present.has(one))) room.members.delete(user);
    for (const { user_id: user, last_acked_sequence: acked } of members) this.#acked(room, user, acked);
    room.roles = new Map(members.map(({ user_id: user, role }) => [user, role]));
    this.#keep(room);
  }

  // A page of older messages.
  recalled(chatId, messages, floor) {
    const room = this.rooms.get(chatId);
    if (!room) return;
    room.prepend(messages, floor);
    for (const message of messages) this.#out.changes.push({ kind: "message", message });
    this.#keep(room);
  }

  // --- frames

  received(frame, now) {
    const isEarly = this.state === "connecting" && ["connected", "error", "connection_closing"].includes(frame.type);
    if (!isEarly && !this.isConnected) return;
    this.heardAt = now;
    this.#read[frame.type]?.call(this, frame, now);
    this.#settle(now);
    this.#flush(now);
  }

  #read = {
    connected({ user_id: me, epoch }, now) {
      if (this.state !== "connecting") return; // a second copy
      this.me = me;
      this.failures = 0;
      this.problem = "";
      this.state = "catching up";
      if (this.epoch !== epoch) this.#beginAnew(epoch);
      for (const room of this.rooms.values()) this.#sync(room, now);
      this.lookedAt = now;
      this.#out.wants.add("chats");
      for (const chatId of this.rooms.keys()) this.#out.wants.add(`members ${chatId}`);
    },

    message(frame, now) {
      const room = this.rooms.get(frame.chat_id);
      if (!room) {
        this.#out.wants.add("chats");
        return;
      }
      this.#add(room, messageOf(frame), now);
    },

    message_batch(frame, now) {
      const room = this.rooms.get(frame.chat_id);
      if (!room) return;
      if (frame.cursor_ahead) {
        this.#restart(room, now);
        return;
      }
      for (const message of frame.messages) this.#add(room, messageOf(message), now);
      room.lastSequence = Math.max(room.lastSequence, frame.last_sequence ?? 0);
      const from = room.syncs.get(frame.request_id);
      if (from === undefined) return; // a second copy, or an answer that we did not wait for
      room.syncs.delete(frame.request_id);
      const before = room.cursor;
      room.cover(from, frame.next_sequence, frame.has_more, now);
      if (room.cursor !== before) this.#keep(room);
      if (frame.has_more) this.#sync(room, now, true);
    },

    send_message_ack(frame, now) {
      const item = this.outbox.find(frame.client_message_id);
      this.outbox.answered(frame.client_message_id, frame.duplicate);
      if (!item) return; // a second copy
      this.#sent(item);
      const room = this.rooms.get(frame.chat_id);
      // Under an id that was used before the first content stays, and that comes from the server.
      if (!room || frame.content_mismatch) return;
      const { message_id, sequence, created_at, chat_id, client_message_id } = frame;
      const said = { content: item.content, content_type: "text/plain", sender_id: this.me };
      this.#add(room, { message_id, chat_id, sequence, client_message_id, created_at, ...said }, now);
    },

    delivery({ chat_id: chatId, user_id: user, last_acked_sequence: acked }, now) {
      const room = this.rooms.get(chatId);
      if (!room) return;
      this.#acked(room, user, acked);
      // Somebody has what we have not: it was lost on its way to us.
      if (acked > room.cursor) room.gapSince ??= now;
    },

    membership({ chat_id: chatId, user_id: user, present: isPresent }) {
      if (user === this.me && !isPresent) this.#leave(chatId);
      else if (this.rooms.has(chatId)) this.#out.wants.add(`members ${chatId}`);
      if (user === this.me && isPresent) this.#out.wants.add("chats");
    },

    error(frame, now) {
      if (frame.code === "AUTH_FAILED") {
        this.state = "refused";
        this.problem = frame.message;
        this.#forgetConnection();
        this.#out.wants.add("close");
        return;
      }
      if (frame.code === "HISTORY_CHANGED") {
        this.#beginAnew(null);
        this.#out.wants.add("close");
        return;
      }
      const item = this.outbox.find(frame.client_message_id);
      if (!item) return;
      if (FINAL.has(frame.code)) {
        item.failed = { code: frame.code, message: frame.message };
        this.#out.changes.push({ kind: "outbox", item: kept(item) });
      } else {
        item.dueAt = now + (frame.retry_after_ms ?? this.limits.sendMs);
      }
    },

    connection_closing({ reason, reconnect_delay_ms: pauseMs }) {
      this.problem = reason;
      this.announcedMs = pauseMs ?? 0;
    },
  };

  #add(room, message, now) {
    const item = this.outbox.find(message.client_message_id);
    if (item && item.chat_id === message.chat_id) this.#sent(item); // the answer was lost, but here it is
    if (!room.add(message, now)) return;
    this.#out.changes.push({ kind: "message", message });
    this.#keep(room);
  }

  // How far a member is. It never goes back, whatever overtakes what.
  #acked(room, user, sequence) {
    if (sequence <= (room.members.get(user) ?? -1)) return;
    room.members.set(user, sequence);
    this.#keep(room);
  }

  #sent(item) {
    this.outbox.remove(item.client_message_id);
    this.#out.changes.push({ kind: "sent", id: item.client_message_id });
  }

  #keep(room) {
    const { chatId, cursor, floor, members } = room;
    this.#out.changes.push({ kind: "room", chat_id: chatId, cursor, floor, members: [...members] });
  }

  #leave(chatId) {
    if (!this.rooms.delete(chatId)) return;
    this.#out.changes.push({ kind: "forget", chat_id: chatId });
  }

  #restart(room, now) {
    this.#out.changes.push({ kind: "forget", chat_id: room.chatId });
    const fresh = new Room(room.chatId);
    fresh.members = room.members;
    fresh.roles = room.roles;
    this.rooms.set(room.chatId, fresh);
    this.#sync(fresh, now);
  }

  // The server's log is another one than before: nothing that came from it counts. What waits is ours, and stays.
  #beginAnew(epoch) {
    for (const chatId of [...this.rooms.keys()]) this.#leave(chatId);
    this.epoch = epoch;
    this.#out.changes.push({ kind: "meta", key: "epoch", value: epoch });
  }

  // --- what time brings

  tick(now) {
    const { connectMs, silenceMs, probeMs, lookMs } = this.limits;
    if (this.state === "offline" && now >= this.connectAt) {
      this.state = "connecting";
      this.since = this.heardAt = now;
      this.#out.wants.add("connect");
    } else if (this.state === "connecting" && now - this.since >= connectMs) {
      this.#out.wants.add("close");
    } else if (this.isConnected) {
      if (now - this.heardAt >= silenceMs) this.#out.wants.add("close");
      this.#mend(now);
      const open = this.rooms.get(this.openRoom);
      if (now - Math.max(this.heardAt, this.probedAt) >= probeMs) this.#probe(open, now);
      if (now - this.lookedAt >= lookMs) {
        this.lookedAt = now;
        this.#out.wants.add("chats");
        if (open) this.#out.wants.add(`members ${open.chatId}`);
      }
      this.#settle(now);
      this.#flush(now);
    }
  }

  // It has been quiet. If the last message was lost, nothing else tells.
  #probe(room, now) {
    this.probedAt = now;
    if (room) this.#sync(room, now, true);
    else this.#send({ type: "ping" });
  }

  // Questions without an answer are asked again, and gaps asked about.
  #mend(now) {
    const { syncMs, gapMs } = this.limits;
    for (const room of this.rooms.values()) {
      const isLate = now - room.askedAt >= (room.syncs.size ? syncMs : gapMs);
      const hasGap = room.gapSince !== null && now - room.gapSince >= gapMs;
      if (isLate && (!room.isCaughtUp || hasGap)) this.#sync(room, now, true);
    }
  }

  // Tells the server how far we are, and ourselves whether we have caught up.
  #settle(now) {
    if (!this.isConnected) return;
    const rooms = [...this.rooms.values()];
    this.state = rooms.every((room) => room.isCaughtUp) ? "live" : "catching up";
    for (const room of rooms) {
      const known = room.members.get(this.me) ?? 0;
      const isNews = room.shownTo > room.acked;
      const wasLost = room.shownTo > known && now - room.ackedAt >= this.limits.syncMs;
      if (!room.isCaughtUp || room.shownTo <= known || !(isNews || wasLost)) continue;
      room.acked = room.shownTo;
      room.ackedAt = now;
      this.#send({ type: "ack", chat_id: room.chatId, last_acked_sequence: room.shownTo });
    }
  }

  #sync(room, now, isUrgent = false) {
    if (!isUrgent && now - room.askedAt < this.limits.syncMs) return;
    this.requests += 1;
    const id = `sync-${this.requests}`;
    room.syncs.set(id, room.cursor);
    room.askedAt = now;
    const { chatId, cursor } = room;
    const asked = { chat_id: chatId, last_acked_sequence: cursor, limit: this.limits.page, epoch: this.epoch };
    this.#send({ type: "sync_request", request_id: id, ...asked });
  }

  #flush(now) {
    if (!this.isConnected) return;
    for (const item of this.outbox.due(now, (chatId) => this.rooms.get(chatId)?.isCaughtUp)) {
      const { sendMs, sendMsMax } = this.limits;
      this.outbox.sending(item, now + this.#jittered(sendMs, sendMsMax, item.attempts + 1));
      const { client_message_id, chat_id, content } = item;
      this.#send({ type: "send_message", client_message_id, chat_id, content });
    }
  }

  #send(frame) {
    this.#out.frames.push(frame);
  }
}

// The fields of a message (CH-10), without those of its frame.
const messageOf = ({ message_id, chat_id, sequence, sender_id, client_message_id, content, content_type, created_at }) => ({
  message_id,
  chat_id,
  sequence,
  sender_id,
  client_message_id,
  content,
  content_type,
  created_at,
});
