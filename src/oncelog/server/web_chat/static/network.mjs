// A bad network, on purpose: it stands between the protocol and the WebSocket, in both directions, and drops, doubles, delays
// and reorders frames. A WebSocket alone does none of that while it is open; this shows what the protocol does about it.

export const BAD = { drop: 0.2, duplicate: 0.2, reorder: 0.3, delayMs: 250 };
export const GOOD = { drop: 0, duplicate: 0, reorder: 0, delayMs: 0 };

// When copies of a frame arrive, in milliseconds from now: none if it is dropped. `behindMs` is when the one before it does: a
// frame that is not reordered does not arrive before that. Pure but for `random`.
export const fate = ({ drop, duplicate, reorder, delayMs }, behindMs, random) => {
  if (random() < drop) return { arrivals: [], isDropped: true, isDoubled: false, isReordered: false };
  const isDoubled = random() < duplicate;
  const isReordered = random() < reorder;
  const first = isReordered ? delayMs + random() * 2 * delayMs : Math.max(behindMs, random() * delayMs);
  const arrivals = isDoubled ? [first, first + random() * 2 * delayMs] : [first];
  return { arrivals, isDropped: false, isDoubled, isReordered };
};

// One direction of one connection. `deliver` gets frames, `tell` what became of each of them.
export class Line {
  constructor({ rates, deliver, tell, random, now, later }) {
    Object.assign(this, { rates, deliver, tell, random, now, later });
    this.lastAt = 0;
    this.isClosed = false;
  }

  carry(frame) {
    const now = this.now();
    const rates = this.rates();
    const { arrivals, ...told } = fate(rates, Math.max(0, this.lastAt - now), this.random);
    if (arrivals.length && !told.isReordered) this.lastAt = now + arrivals[0];
    this.tell(frame, { ...told, delayMs: Math.round(arrivals[0] ?? 0) });
    for (const afterMs of arrivals) {
      if (afterMs <= 0) this.#arrive(frame);
      else this.later(() => this.#arrive(frame), afterMs);
    }
  }

  // What is still under way on a connection that has ended does not arrive any more.
  close() {
    this.isClosed = true;
  }

  #arrive(frame) {
    if (!this.isClosed) this.deliver(frame);
  }
}
