// The client side of the chat protocol, without I/O. Its inputs are frames, HTTP answers, times and user actions. `take`
// returns the outputs: frames to send, changes to store, and requested actions. The caller stores the changes before it sends
// the frames, because after a crash the client must still have every message that it sent or acknowledged (CH-12).
import { Outbox, kept } from "./outbox.mjs";
import { Room } from "./room.mjs";

export const LIMITS = {
  connectMs: 3000, // timeout for `connected`
  silenceMs: 20_000, // the connection is considered dead after this long without a frame, despite probes
  probeMs: 2000, // the open chat is synced after this long without a frame
  lookMs: 4000, // interval between polls of the chats and their members
  gapMs: 120, // delay before a gap is synced, because overtaken messages may still arrive
  syncMs: 1200, // timeout after which a sync is repeated
  sendMs: 500, // timeout after which a message is sent again; doubles with each retry, up to
  sendMsMax: 3000,
  pauseMs: 200, // delay before reconnecting; doubles with each failure, up to
  pauseMsMax: 3000,
  history: 200, // how many messages to load from a chat that is new to this client
  page: 100, // messages in a sync page
};
const FINAL = new Set(["NOT_A_MEMBER", "INVALID_MESSAGE", "MESSAGE_TOO_LARGE", "INVALID_REQUEST"]);

export class Protocol {
  // `random` returns numbers from 0 to 1, `newId` UUIDs of version 4.
  constructor({ token, deviceId, random, newId, limits = {} }) {
    this.token = token;
    this.deviceId = deviceId;
    this.me = `user:${token}`; // the same as in `connected`, to show unsent messages before that arrives
    this.epoch = null;
    this.state = "offline"; // off, offline, connecting, catching up, live, refused
    this.problem = "";
    this.rooms = new Map();
    this.outbox = new Outbox();
    this.openRoom = null;
    this.limits = { ...LIMITS, ...limits };
    this.random = random;
    this.newId = newId;
    this.connectAt = 0; // time of the next attempt to connect
    this.announcedMs = 0; // reconnect delay that the server announced
    this.failures = 0;
    this.since = 0;
    this.heardAt = 0;
    this.probedAt = 0;
    this.lookedAt = -Infinity;
    this.requests = 0;
  }

  #out = { frames: [], changes: [], wants: new Set() };

  // Return and clear the outputs: store the changes, then send the frames. `wants` contains requests to connect, close or poll.
  take() {
    const taken = this.#out;
    this.#out = { frames: [], changes: [], wants: new Set() };
    return taken;
  }

  // Restore the state that an earlier page stored.
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

  // --- actions of the user

  submit(chatId, content, now) {
    const item = this.outbox.write(this.newId(), chatId, content, now);
    this.#out.changes.push({ kind: "outbox", item });
    this.#flush(now);
    return item.client_message_id;
  }

  // Resend a refused message under the same id, because an earlier attempt may have been committed.
  again(id, now) {
    const item = this.outbox.find(id);
    if (!item) return;
    Object.assign(item, { failed: undefined, dueAt: 0, attempts: 0 });
    this.#out.changes.push({ kind: "outbox", item: kept(item) });
    this.#flush(now);
  }

  // Poll chats and members immediately, after a change by this client.
  look() {
    this.#out.wants.add("chats");
    if (this.rooms.has(this.openRoom)) this.#out.wants.add(`members ${this.openRoom}`);
  }

  discard(id) {
    if (this.outbox.remove(id)) this.#out.changes.push({ kind: "sent", id });
  }

  // --- answers over HTTP

  // Apply the list of the user's chats, with their last sequences and the user's watermarks.
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

  // Apply a chat's members, with their roles and watermarks.
  described(chatId, members) {
    const room = this.rooms.get(chatId);
    if (!room) return;
    const present = new Set(members.map((member) => member.user_id));
    for (const user of [...room.members.keys()].filter((one) => !present.has(one))) room.members.delete(user);
    for (const { user_id: user, last_acked_sequence: acked } of members) this.#acked(room, user, acked);
    room.roles = new Map(members.map(({ user_id: user, role }) => [user, role]));
    this.#keep(room);
  }

  // Apply a page of older messages.
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
      if (from === undefined) return; // a second copy, or an answer from an earlier connection
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
      // The server keeps the first content under an id, so the client reads that content from the server.
      if (!room || frame.content_mismatch) return;
      const { message_id, sequence, created_at, chat_id, client_message_id } = frame;
      const said = { content: item.content, content_type: "text/plain", sender_id: this.me };
      this.#add(room, { message_id, chat_id, sequence, client_message_id, created_at, ...said }, now);
    },

    delivery({ chat_id: chatId, user_id: user, last_acked_sequence: acked }, now) {
      const room = this.rooms.get(chatId);
      if (!room) return;
      this.#acked(room, user, acked);
      // Another member has a message that this client lacks, so its frame was lost.
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
    if (item && item.chat_id === message.chat_id) this.#sent(item); // the message replaces the lost answer
    if (!room.add(message, now)) return;
    this.#out.changes.push({ kind: "message", message });
    this.#keep(room);
  }

  // Raise a member's watermark. Frames may overtake each other, so ignore a lower value.
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

  // Start over with a different log: discard everything from the previous log, but keep the unsent messages.
  #beginAnew(epoch) {
    for (const chatId of [...this.rooms.keys()]) this.#leave(chatId);
    this.epoch = epoch;
    this.#out.changes.push({ kind: "meta", key: "epoch", value: epoch });
  }

  // --- timers

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

  // Sync the open chat after a quiet interval, because only a sync reveals that the last message was lost.
  #probe(room, now) {
    this.probedAt = now;
    if (room) this.#sync(room, now, true);
    else this.#send({ type: "ping" });
  }

  // Repeat unanswered syncs, and sync chats with gaps.
  #mend(now) {
    const { syncMs, gapMs } = this.limits;
    for (const room of this.rooms.values()) {
      const isLate = now - room.askedAt >= (room.syncs.size ? syncMs : gapMs);
      const hasGap = room.gapSince !== null && now - room.gapSince >= gapMs;
      if (isLate && (!room.isCaughtUp || hasGap)) this.#sync(room, now, true);
    }
  }

  // Send acknowledgements, and determine whether the client has caught up.
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

// Return the fields of a message (CH-10), without the other fields of its frame.
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
