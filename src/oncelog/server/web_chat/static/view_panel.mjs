// The panel “Behind the scenes”: the simulated network, facts about the open chat, and the connection's frames.
import { byId, el, keyed, setText } from "./dom.mjs";
import { nameOf } from "./entries.mjs";
import { BAD } from "./network.mjs";
import { audit } from "./room.mjs";

const FRAMES_MAX = 150;
const RATES = [
  ["drop", "Drop", 100],
  ["duplicate", "Double", 90],
  ["reorder", "Reorder", 90],
  ["delayMs", "Delay", 2000],
];
const percent = (value) => `${Math.round(value * 100)} %`;

export class PanelView {
  // `chose` receives good, bad or off. The sliders change `rates` in place.
  constructor({ chose, rates = { ...BAD } }) {
    this.rates = rates;
    this.counts = { dropped: 0, doubled: 0, reordered: 0, frames: 0 };
    this.told = [];
    this.fillMarks = keyed(byId("watermarks"), ({ user }) => user, makeWatermark, updateWatermark);
    byId("network").addEventListener("change", ({ target }) => chose(target.value));
    byId("frames-clear").addEventListener("click", () => {
      this.told = [];
      byId("frames").replaceChildren();
    });
    byId("rates").append(...RATES.map((one) => this.#slider(...one)));
  }

  show(mode) {
    byId("network").querySelector(`[value=${mode}]`).checked = true;
    byId("rates").hidden = mode !== "bad";
  }

  #slider(name, title, most) {
    const isTime = name === "delayMs";
    const output = el("output");
    const input = el("input", { type: "range", min: 0, max: isTime ? most : most / 100, step: isTime ? 10 : 0.05 });
    input.value = this.rates[name];
    input.name = name;
    const show = () => setText(output, isTime ? `${input.value} ms` : percent(Number(input.value)));
    input.addEventListener("input", () => {
      this.rates[name] = Number(input.value);
      show();
    });
    show();
    return el("label", {}, el("span", {}, title), input, output);
  }

  draw({ room, me, entries, silent }) {
    const { dropped, doubled, reordered, frames } = this.counts;
    const harm = `dropped ${dropped}, doubled ${doubled} and reordered ${reordered} of ${frames} frames`;
    setText(byId("harm"), dropped + doubled + reordered ? `The network ${harm}.` : "The network has not disturbed any frame yet.");
    const committed = entries.filter((entry) => entry.sequence !== null);
    const found = audit(committed.map(messageOf));
    const waiting = entries.length - committed.length;
    facts(byId("audit"), [
      ["messages", found.count ? `${found.count} (#${found.first}–#${found.last})` : "none", "count"],
      ["missing", String(found.missing), found.missing ? "bad" : "good"],
      ["doubled", String(found.doubled), found.doubled ? "bad" : "good"],
      ["waiting to be sent", String(waiting), "waiting"],
      ["held behind a gap", String(room?.held ?? 0), "held"],
      ["order", found.fingerprint, "order"],
    ]);
    const last = room?.lastSequence ?? 0;
    const members = [...(room?.members ?? [])].filter(([user]) => !silent.has(user)).sort(([a], [b]) => (a < b ? -1 : 1));
    this.fillMarks(members.map(([user, acked]) => ({ user, acked, last, isMe: user === me })));
  }

  // Show a frame or an HTTP request.
  tell(told) {
    if (told.frame) {
      this.counts.frames += 1;
      this.counts.dropped += told.isDropped ? 1 : 0;
      this.counts.doubled += told.isDoubled ? 1 : 0;
      this.counts.reordered += told.isReordered ? 1 : 0;
    }
    const list = byId("frames");
    list.prepend(told.frame ? frameLine(told) : requestLine(told));
    while (list.childElementCount > FRAMES_MAX) list.lastElementChild.remove();
  }
}

const messageOf = ({ sequence, messageId, key, content }) => ({
  sequence,
  message_id: messageId,
  client_message_id: key,
  content,
});

const facts = (list, rows) => {
  const text = JSON.stringify(rows);
  if (list.dataset.text === text) return;
  list.dataset.text = text;
  list.replaceChildren(
    ...rows.flatMap(([name, value, kind]) => [el("dt", {}, name), el("dd", { data: { kind } }, value)]),
  );
};

const makeWatermark = ({ user }) =>
  el("tr", { data: { user } }, el("th", { scope: "row" }), el("td", {}, el("meter"), el("span")));

const updateWatermark = (row, { user, acked, last, isMe }) => {
  setText(row.firstElementChild, isMe ? `${nameOf(user)} (you)` : nameOf(user));
  const meter = row.querySelector("meter");
  meter.max = Math.max(1, last);
  meter.value = acked;
  meter.setAttribute("aria-label", `${nameOf(user)}: ${acked} of ${last}`);
  setText(row.querySelector("span"), `#${acked}`);
};

const frameLine = ({ isOut, frame, isDropped, isDoubled, isReordered, delayMs }) => {
  const { type, ...fields } = frame;
  const badges = [
    isDropped && ["dropped", "bad"],
    isDoubled && ["doubled", "odd"],
    isReordered && ["reordered", "odd"],
    delayMs > 0 && [`${delayMs} ms late`, "late"],
    fields.duplicate === true && ["duplicate", "good"],
    type === "error" && [fields.code, "bad"],
  ].filter(Boolean);
  return line(isOut ? "→" : "←", isOut ? "to the server" : "from the server", type, badges, fields, isDropped);
};

const requestLine = ({ method, url, status, body, answer }) =>
  line("↔", "over HTTP", `${method} ${url}`, [[String(status), status < 400 ? "late" : "bad"]], { ...(body ? { body } : {}), answer });

const line = (arrow, direction, title, badges, fields, isDropped = false) =>
  el(
    "li",
    { className: isDropped ? "dropped" : "" },
    el("span", { className: "arrow", title: direction, "aria-label": direction, role: "img" }, arrow),
    el("span", { className: "frame-title" }, title),
    ...badges.map(([text, kind]) => el("span", { className: "badge", data: { kind } }, text)),
    el("code", {}, short(fields)),
  );

// Encode fields as one line of JSON, with sequences instead of message contents.
const short = (fields) => {
  const { messages, token, ...rest } = fields;
  const numbers = messages?.map(({ sequence }) => sequence);
  return JSON.stringify(messages ? { ...rest, messages: numbers } : rest).slice(0, 600);
};
