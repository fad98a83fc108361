// The messages of the open chat.
import { byId, el, hueOf, icon, keyed, setText } from "./dom.mjs";
import { FAILED, markText, nameOf } from "./entries.mjs";

const NEAR_PX = 80; // the list scrolls to new messages if it is this close to the end
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

export class MessagesView {
  // `again` and `discard` receive the id of a refused message.
  constructor({ again, discard }) {
    this.list = byId("messages");
    this.scroll = byId("scroll");
    this.act = { again, discard };
    this.unfolded = new Set();
    this.current = null; // the key of the message that Tab focuses
    this.chatId = null;
    this.list.addEventListener("keydown", (event) => this.#move(event));
    this.list.addEventListener("focusin", ({ target }) => this.#setCurrent(target.closest("li")?.dataset.id));
    this.#begin();
  }

  #begin() {
    this.list.replaceChildren();
    this.fill = keyed(this.list, (entry) => entry.key, (entry) => this.#make(entry), (...given) => this.#update(...given));
  }

  draw(chatId, entries) {
    const isOther = chatId !== this.chatId;
    if (isOther) this.#begin();
    this.chatId = chatId;
    const { scrollHeight, scrollTop, clientHeight } = this.scroll;
    const isAtEnd = isOther || scrollHeight - scrollTop - clientHeight < NEAR_PX;
    this.fill(entries);
    if (!this.list.contains(document.activeElement)) this.#setCurrent(entries.at(-1)?.key);
    if (isAtEnd) this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  // Scroll to the end to show the message that the visitor has just written.
  toEnd() {
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  #make({ key, sender, isMine }) {
    const name = nameOf(sender);
    const item = el("li", { className: isMine ? "message mine" : "message", data: { id: key } });
    const number = el("button", { type: "button", className: "number", tabIndex: -1, "aria-expanded": "false" });
    number.addEventListener("click", () => this.#fold(item, key));
    item.append(
      el("span", { className: "avatar", "aria-hidden": "true", data: { hue: hueOf(name) } }, name.slice(0, 1).toUpperCase()),
      el(
        "div",
        { className: "bubble" },
        el("span", { className: isMine ? "hidden" : "sender", data: { hue: hueOf(name) } }, isMine ? "You" : name),
        el("p", { className: "content", dir: "auto" }),
        el("div", { className: "meta" }, el("time"), number, el("span", { className: "mark" })),
        el("dl", { className: "details", hidden: true }),
        el("div", { className: "refused", hidden: true }),
      ),
    );
    return item;
  }

  #update(item, entry, index, entries) {
    const { key, sequence, sender, content, isErased, at, mark } = entry;
    setText(item.querySelector(".content"), isErased ? "This message was erased." : content);
    item.classList.toggle("erased", isErased);
    item.dataset.sequence = sequence ?? "";
    item.dataset.mark = mark ?? "";
    item.classList.toggle("follows", entries[index - 1]?.sender === sender);
    const time = item.querySelector("time");
    time.dateTime = at;
    setText(time, clock.format(new Date(at)));
    const number = item.querySelector(".number");
    setText(number, sequence === null ? "no number yet" : `#${sequence}`);
    number.setAttribute("aria-label", sequence === null ? "No number yet, details" : `Number ${sequence}, details`);
    number.tabIndex = key === this.current ? 0 : -1;
    this.#mark(item.querySelector(".mark"), entry);
    this.#refusal(item.querySelector(".refused"), entry);
    if (this.unfolded.has(key)) this.#details(item, entry);
    item.entry = entry;
  }

  #mark(place, entry) {
    const text = markText(entry);
    if (place.dataset.text === text) return;
    place.dataset.text = text;
    place.title = text;
    place.replaceChildren(...(entry.mark ? [icon(entry.mark), el("span", { className: "hidden" }, text)] : []));
    if (entry.mark === "reached") place.append(el("span", { "aria-hidden": "true" }, `${entry.having.length}/${entry.of}`));
  }

  #refusal(place, { mark, key, failed }) {
    const isRefused = mark === FAILED;
    if (place.hidden === !isRefused) return;
    place.hidden = !isRefused;
    place.replaceChildren();
    if (!isRefused) return;
    const button = (text, act) => {
      const made = el("button", { type: "button" }, text);
      made.addEventListener("click", () => act(key));
      return made;
    };
    place.append(
      el("span", {}, `Not sent: ${failed.message} (${failed.code})`),
      button("Try again", this.act.again),
      button("Discard", this.act.discard),
    );
  }

  // --- details

  #fold(item, key) {
    const isOpen = !this.unfolded.delete(key);
    if (isOpen) this.unfolded.add(key);
    item.querySelector(".number").setAttribute("aria-expanded", String(isOpen));
    item.querySelector(".details").hidden = !isOpen;
    item.classList.toggle("unfolded", isOpen);
    if (isOpen) this.#details(item, item.entry);
  }

  #details(item, { key, sequence, messageId, sender, at, isMine, having, attempts, isDuplicate }) {
    const repeated = isDuplicate ? ", and the server answered that it already had it" : "";
    const facts = [
      ["sequence", sequence ?? "none yet"],
      ["message_id", messageId ?? "none yet"],
      ["client_message_id", key],
      ["sender_id", sender],
      ["created_at", sequence === null ? `written ${at}` : at],
      ...(isMine && attempts ? [["sent", `${attempts} ${attempts === 1 ? "time" : "times"}${repeated}`]] : []),
      ...(isMine ? [["delivered to", having.map(nameOf).join(", ") || "nobody yet"]] : []),
    ];
    const list = item.querySelector(".details");
    const text = JSON.stringify(facts);
    if (list.dataset.text === text) return;
    list.dataset.text = text;
    list.replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]));
  }

  // --- the keyboard: the list is a single Tab stop, and arrow keys move between messages

  #setCurrent(key) {
    if (!key || key === this.current) return;
    this.current = key;
    for (const item of this.list.children) item.querySelector(".number").tabIndex = item.dataset.id === key ? 0 : -1;
  }

  #move(event) {
    const items = [...this.list.children];
    const at = items.findIndex((item) => item.contains(document.activeElement));
    const to = { ArrowUp: at - 1, ArrowDown: at + 1, Home: 0, End: items.length - 1 }[event.key];
    if (at < 0 || to === undefined || !items[to]) return;
    event.preventDefault();
    items[to].querySelector(".number").focus();
    items[to].scrollIntoView({ block: "nearest" });
  }
}
