// One chat as a client knows it: what has come, up to where it is whole, and how far everybody has come. No I/O.
//
// `cursor` is the sequence up to which everything is known, `shownTo` the one up to which it is shown: while a catch-up
// takes several pages the second stays where it was, so that nobody sees half of it (CH-12). What comes beyond a gap is
// held until the server has said what belongs into the gap. A gap alone is no error: the server may have one too.

export class Room {
  constructor(chatId, { cursor = 0, floor = 0, messages = [], members = [] } = {}) {
    this.chatId = chatId;
    this.cursor = cursor;
    this.floor = floor; // what is below was not asked for: older than anybody wants to see at once
    this.shownTo = cursor;
    this.lastSequence = cursor;
    this.messages = new Map(messages.map((message) => [message.sequence, message]));
    this.members = new Map(members); // user → the last sequence that they have
    this.roles = new Map(); // user → owner or member, as the server said last; not stored
    this.isCaughtUp = false; // on this connection
    this.gapSince = null;
    this.syncs = new Map(); // what was asked and has no answer yet: request id → the sequence asked from
    this.askedAt = -Infinity;
    this.acked = 0; // what we have told the server on this connection
    this.ackedAt = -Infinity;
  }

  // The connection is another one: what was asked on the one before gets no answer.
  lost() {
    this.isCaughtUp = false;
    this.gapSince = null;
    this.syncs.clear();
    this.askedAt = this.ackedAt = -Infinity;
    this.acked = 0;
  }

  // A message came, live or as an answer. Says whether it is new.
  add(message, now) {
    this.lastSequence = Math.max(this.lastSequence, message.sequence);
    if (message.sequence <= this.floor || this.messages.has(message.sequence)) return false;
    this.messages.set(message.sequence, message);
    this.#advance(this.cursor, now);
    return true;
  }

  // A page of a catch-up: all between `from` and `to` has come with it.
  cover(from, to, hasMore, now) {
    if (from > this.cursor) return; // asked before this room began anew
    this.isCaughtUp = !hasMore;
    this.#advance(Math.max(this.cursor, to), now);
  }

  // Older messages, which were asked for by hand.
  prepend(messages, floor) {
    for (const message of messages) this.messages.set(message.sequence, message);
    this.floor = floor;
  }

  get held() {
    return [...this.messages.keys()].filter((sequence) => sequence > this.cursor).length;
  }

  // What is shown, in its order. One's own message is, as soon as it is acknowledged, also beyond a gap (CH-1).
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

// Eight digits that are the same in two windows if both show the same messages in the same order.
export const fingerprint = (messages) => {
  let hash = 0x811c9dc5; // FNV-1a: not against forgers, but quick, and short enough to compare by eye
  for (const { sequence, message_id: id, content } of messages) {
    for (const character of `${sequence} ${id} ${content}\n`) {
      hash = Math.imul(hash ^ character.codePointAt(0), 0x01000193) >>> 0;
    }
  }
  return hash.toString(16).padStart(8, "0");
};

// The shortest leap after a restore (CO-12): no message has the numbers that it passes over.
const LEAP_MIN = 1_000_000;

// How many numbers between the first and the last are not there.
const missingIn = (sequences) =>
  [...new Set(sequences)]
    .sort((a, b) => a - b)
    .reduce(([sum, before], sequence) => {
      const skipped = before === null ? 0 : sequence - before - 1;
      return [sum + (skipped < LEAP_MIN ? skipped : 0), sequence];
    }, [0, null])[0];

// What a visitor wants to know of a bad network: whether anything is missing, and whether anything is there twice.
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
