// Simulates a bad network between the protocol and the WebSocket, to demonstrate how the protocol recovers. It drops,
// duplicates, delays and reorders frames in both directions. An open WebSocket itself never loses or reorders frames.

export const BAD = { drop: 0.2, duplicate: 0.2, reorder: 0.3, delayMs: 250 };
export const GOOD = { drop: 0, duplicate: 0, reorder: 0, delayMs: 0 };

// Return the delays after which the copies of a frame arrive, in milliseconds. A dropped frame has no copies. A frame that is
// not reordered arrives no earlier than `behindMs`, when the previous frame arrives. Pure except for `random`.
export const fate = ({ drop, duplicate, reorder, delayMs }, behindMs, random) => {
  if (random() < drop) return { arrivals: [], isDropped: true, isDoubled: false, isReordered: false };
  const isDoubled = random() < duplicate;
  const isReordered = random() < reorder;
  const first = isReordered ? delayMs + random() * 2 * delayMs : Math.max(behindMs, random() * delayMs);
  const arrivals = isDoubled ? [first, first + random() * 2 * delayMs] : [first];
  return { arrivals, isDropped: false, isDoubled, isReordered };
};

// One direction of a connection. `deliver` receives the frames, and `tell` receives what happened to each frame.
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

  // Frames in flight do not arrive after the connection is closed.
  close() {
    this.isClosed = true;
  }

  #arrive(frame) {
    if (!this.isClosed) this.deliver(frame);
  }
}
