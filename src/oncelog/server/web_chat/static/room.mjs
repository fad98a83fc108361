// The client's view of one chat: its messages, its members and their watermarks. No I/O.
//
// The client has all messages up to `cursor` and shows those up to `shownTo`. During a catch-up of several pages `shownTo` does
// not move, so that the page never shows part of the catch-up (CH-12). Messages after a gap are held back until the server has
// answered a sync for the gap. A gap is not an error, because the server's sequences may have gaps too.

export class Room {
  constructor(chatId, { cursor = 0, floor = 0, messages = [], members = [] } = {}) {
    this.chatId = chatId;
    this.cursor = cursor;
    this.floor = floor; // older messages up to this sequence have not been requested
    this.shownTo = cursor;
    this.lastSequence = cursor;
    this.messages = new Map(messages.map((message) => [message.sequence, message]));
    this.members = new Map(members); // user → watermark
    this.roles = new Map(); // user → owner or member, as in the last answer; not stored
    this.isCaughtUp = false; // on this connection
    this.gapSince = null;
    this.syncs = new Map(); // request id → cursor of each unanswered sync
    this.askedAt = -Infinity;
    this.acked = 0; // the last acknowledgement on this connection
    this.ackedAt = -Infinity;
  }

  // Reset the connection state. Requests on an earlier connection are never answered.
  lost() {
    this.isCaughtUp = false;
    this.gapSince = null;
    this.syncs.clear();
    this.askedAt = this.ackedAt = -Infinity;
    this.acked = 0;
  }

  // Add a message from a broadcast or an answer. Returns whether it is new.
  add(message, now) {
    this.lastSequence = Math.max(this.lastSequence, message.sequence);
    if (message.sequence <= this.floor || this.messages.has(message.sequence)) return false;
    this.messages.set(message.sequence, message);
    this.#advance(this.cursor, now);
    return true;
  }

  // Apply a page of a catch-up, which contains all messages from `from` to `to`.
  cover(from, to, hasMore, now) {
    if (from > this.cursor) return; // the request is from before this room was reset
    this.isCaughtUp = !hasMore;
    this.#advance(Math.max(this.cursor, to), now);
  }

  // Add older messages that the visitor requested.
  prepend(messages, floor) {
    for (const message of messages) this.messages.set(message.sequence, message);
    this.floor = floor;
  }

  get held() {
    return [...this.messages.keys()].filter((sequence) => sequence > this.cursor).length;
  }

  // Return the shown messages, in order. A committed message of the visitor is shown even after a gap (CH-1).
  shown(me) {
    return [...this.messages.values()]
      .filter((message) => message.sequence <= this.shownTo || message.sender_id === me)
      .sort((a, b) => a.sequence - b.sequence);
  }

  #advance(to, now) {
    this.cursor = to;
    while (this.messages.has(this.cursor + 1)) this.cursor += 1;
    if (this.isCaughtUp) this.shownTo = this.cursor;
    const hasGap = [...this.messages.keys()].some((sequence) => sequence > this.cursor);
    this.gapSince = hasGap ? (this.gapSince ?? now) : null;
    this.lastSequence = Math.max(this.lastSequence, this.cursor);
  }
}

// Return eight digits that are the same in two windows if both show the same messages in the same order.
export const fingerprint = (messages) => {
  let hash = 0x811c9dc5; // FNV-1a: not secure against forgery, but fast, and short enough to compare by eye
  for (const { sequence, message_id: id, content } of messages) {
    for (const character of `${sequence} ${id} ${content}\n`) {
      hash = Math.imul(hash ^ character.codePointAt(0), 0x01000193) >>> 0;
    }
  }
  return hash.toString(16).padStart(8, "0");
};

// The shortest leap after a restore (CO-12). Its skipped numbers do not belong to messages.
const LEAP_MIN = 1_000_000;

// Count the missing numbers between the first and the last.
const missingIn = (sequences) =>
  [...new Set(sequences)]
    .sort((a, b) => a - b)
    .reduce(([sum, before], sequence) => {
      const skipped = before === null ? 0 : sequence - before - 1;
      return [sum + (skipped < LEAP_MIN ? skipped : 0), sequence];
    }, [0, null])[0];

// Return the facts for the panel: whether a message is missing, and whether one occurs twice.
export const audit = (messages) => {
  const sequences = messages.map(({ sequence }) => sequence);
  const ids = new Set(messages.map(({ client_message_id: id }) => id));
  const first = sequences[0] ?? 0;
  const last = sequences.at(-1) ?? 0;
  return {
    count: messages.length,
    first,
    last,
    missing: missingIn(sequences),
    doubled: messages.length - ids.size,
    fingerprint: fingerprint(messages),
  };
};
