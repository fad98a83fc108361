// Runs the protocol with a socket, a store and a clock. The protocol makes all decisions.
import { ApiError } from "./api.mjs";
import { GOOD, Line } from "./network.mjs";

const TICK_MS = 50;

export class Shell {
  // The shell calls `changed` when the views are out of date, and `tell` with every frame and what the network did to it.
  constructor({ protocol, store, api, url, rates, changed, tell, trouble }) {
    Object.assign(this, { protocol, store, api, url, rates, changed, tell, trouble });
    this.socket = null;
    this.lines = [];
    this.saving = Promise.resolve();
    this.looking = new Map();
  }

  start() {
    setInterval(() => this.do((protocol, now) => protocol.tick(now)), TICK_MS);
    addEventListener("online", () => this.do((protocol, now) => protocol.hurry(now)));
    this.do((protocol, now) => protocol.tick(now));
  }

  // Call a method of the protocol, then carry out its outputs.
  do(what) {
    const result = what(this.protocol, Date.now());
    const { frames, changes, wants } = this.protocol.take();
    if (frames.length || changes.length) this.#keepThenSend(changes, frames, this.socket);
    for (const want of wants) this.#want(want);
    if (frames.length || changes.length || wants.size) this.changed();
    return result;
  }

  #keepThenSend(changes, frames, socket) {
    const lines = this.lines;
    this.saving = this.saving.then(async () => {
      try {
        if (changes.length) await this.store.save(changes);
      } catch (error) {
        this.trouble(`This browser cannot store messages: ${error.message ?? error}`);
      }
      if (socket === this.socket) for (const frame of frames) lines[0]?.carry(frame);
    });
  }

  #want(want) {
    if (want === "connect") this.#connect();
    else if (want === "close") this.#close();
    else this.#look(want);
  }

  // --- the socket

  #connect() {
    const socket = new WebSocket(this.url);
    const line = (deliver, isOut) =>
      new Line({
        rates: this.rates ?? (() => GOOD),
        deliver,
        tell: (frame, told) => this.tell({ isOut, frame, ...told }),
        random: Math.random,
        now: () => performance.now(),
        later: (what, ms) => setTimeout(what, ms),
      });
    const outgoing = line((frame) => socket.readyState === WebSocket.OPEN && socket.send(JSON.stringify(frame)), true);
    const incoming = line((frame) => this.do((protocol, now) => protocol.received(frame, now)), false);
    this.socket = socket;
    this.lines = [outgoing, incoming];
    socket.onopen = () => this.#of(socket, (protocol, now) => protocol.opened(now));
    socket.onmessage = ({ data }) => socket === this.socket && incoming.carry(JSON.parse(data));
    socket.onclose = () => socket === this.socket && this.#close();
  }

  #close() {
    for (const line of this.lines) line.close();
    this.lines = [];
    const { socket } = this;
    this.socket = null;
    socket?.close();
    this.do((protocol, now) => protocol.lost(now));
    this.changed();
  }

  #of(socket, what) {
    if (socket === this.socket) this.do(what);
  }

  // --- HTTP

  // Run one request of each kind at a time. If it is wanted again meanwhile, repeat it, because the answer may be out of date.
  #look(want) {
    if (this.looking.has(want)) {
      this.looking.set(want, true);
      return;
    }
    this.looking.set(want, false);
    this.#ask(want).finally(() => {
      const isWantedAgain = this.looking.get(want);
      this.looking.delete(want);
      if (isWantedAgain) this.#look(want);
    });
  }

  async #ask(want) {
    const [kind, ...rest] = want.split(" ");
    const chatId = rest.join(" ");
    try {
      if (kind === "chats") {
        const chats = await this.api.chats();
        this.do((protocol, now) => protocol.listed(chats, now));
        this.listed?.(chats);
      } else {
        const members = await this.api.members(chatId);
        this.do((protocol) => protocol.described(chatId, members));
      }
      this.changed();
    } catch (error) {
      // Ignore the error: the socket also reports an unreachable server, and the list of chats shows lost memberships.
      if (!(error instanceof ApiError || error instanceof TypeError)) throw error;
    }
  }
}
