// The list of chats, and the heading of the open chat.
import { byId, el, keyed, setText } from "./dom.mjs";
import { nameOf } from "./entries.mjs";

export class ChatsView {
  constructor({ open }) {
    const make = ({ chatId }) => {
      const button = el(
        "button",
        { type: "button" },
        el("span", { className: "chat-name" }, chatId),
        el("span", { className: "preview" }),
        el("span", { className: "unread" }),
      );
      button.addEventListener("click", () => open(chatId));
      return el("li", { data: { chat: chatId } }, button);
    };
    this.fill = keyed(byId("chat-list"), ({ chatId }) => chatId, make, update);
  }

  // Each chat is given with its id, its last entry, how many entries are unread, and whether it is open.
  draw(chats) {
    this.fill(chats);
  }
}

const update = (item, { last, unread, isOpen }) => {
  const button = item.firstElementChild;
  if (isOpen) button.setAttribute("aria-current", "true");
  else button.removeAttribute("aria-current");
  const said = last ? `${last.isMine ? "You" : nameOf(last.sender)}: ${last.content}` : "";
  setText(button.querySelector(".preview"), said.slice(0, 80));
  setText(button.querySelector(".unread"), unread ? String(unread) : "");
  button.querySelector(".unread").title = unread ? `${unread} unread` : "";
};

const MANY = 4;

// Return the text that lists a chat's other members.
export const membersText = (members, me, silent) => {
  const others = [...members].filter((user) => user !== me && !silent.has(user)).map(nameOf);
  if (!others.length) return "Nobody else is here yet";
  const rest = others.length - MANY;
  return `You, ${others.slice(0, MANY).join(", ")}${rest > 0 ? ` and ${rest} more` : ""}`;
};
