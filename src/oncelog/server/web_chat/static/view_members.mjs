// The members of the open chat, with their roles. Owners see buttons to remove members and to make them owners.
import { byId, el, keyed, setText } from "./dom.mjs";
import { nameOf } from "./entries.mjs";

export const OWNER = "owner";

export class MembersView {
  // `remove` and `makeOwner` receive a user.
  constructor({ remove, makeOwner }) {
    const button = (className, text, act) => {
      const made = el("button", { type: "button", className }, text);
      made.addEventListener("click", act);
      return made;
    };
    const make = ({ user }) =>
      el(
        "li",
        { data: { user } },
        el("span", { className: "member-name" }),
        el("span", { className: "badge role" }, OWNER),
        button("make-owner", "Make owner", () => makeOwner(user)),
        button("remove", "Remove", () => remove(user)),
      );
    this.fill = keyed(byId("member-list"), ({ user }) => user, make, update);
  }

  draw({ room, me }) {
    const roles = room?.roles ?? new Map();
    const isOwner = roles.get(me) === OWNER;
    byId("invite").hidden = !isOwner;
    byId("owners-only").hidden = isOwner || !roles.has(me);
    const users = [...(room?.members.keys() ?? [])].sort();
    this.fill(users.map((user) => ({ user, role: roles.get(user), isMe: user === me, isOwner })));
  }
}

const update = (item, { user, role, isMe, isOwner }) => {
  const name = nameOf(user);
  const [title, badge, makeOwner, remove] = item.children;
  setText(title, isMe ? `${name} (you)` : name);
  badge.hidden = role !== OWNER;
  makeOwner.hidden = !isOwner || role === OWNER;
  makeOwner.setAttribute("aria-label", `Make ${name} an owner`);
  remove.hidden = !isOwner || isMe;
  remove.setAttribute("aria-label", `Remove ${name}`);
};
