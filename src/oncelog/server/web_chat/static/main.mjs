// Connects the parts of the page: the visitor's name, the store, the protocol and the views.
import { Api, ApiError, KEEPER, LOBBY } from "./api.mjs";
import { byId, setText } from "./dom.mjs";
import { entriesOf, nameOf } from "./entries.mjs";
import { BAD, GOOD } from "./network.mjs";
import { Protocol } from "./protocol.mjs";
import { Shell } from "./shell.mjs";
import { Store } from "./store.mjs";
import { startTheme } from "./theme.mjs";
import { ChatsView, membersText } from "./view_chats.mjs";
import { Composer } from "./view_composer.mjs";
import { MessagesView } from "./view_messages.mjs";
import { MembersView } from "./view_members.mjs";
import { PanelView } from "./view_panel.mjs";
import { keepPage, welcome } from "./visit.mjs";

const STATES = {
  off: "○ switched off",
  offline: "○ offline",
  connecting: "○ connecting",
  "catching up": "◐ catching up",
  live: "● live",
  refused: "✕ refused",
};
const SILENT = new Set([`user:${KEEPER}`]);
const OLDER = 100;

const start = async (name, asked) => {
  const store = await Store.open(name);
  const restored = await store.load();
  const deviceId = restored.deviceId ?? crypto.randomUUID();
  if (!restored.deviceId) await store.save([{ kind: "meta", key: "device", value: deviceId }]);

  const protocol = new Protocol({ token: name, deviceId, random: Math.random, newId: () => crypto.randomUUID() });
  protocol.restore(restored);

  // --- the simulated network, whose mode survives a reload

  const kept = JSON.parse(sessionStorage.getItem("oncelog-network") ?? "{}");
  const network = { mode: kept.mode ?? "good", rates: { ...BAD, ...kept.rates } };
  const keepNetwork = () => sessionStorage.setItem("oncelog-network", JSON.stringify(network));
  const panel = new PanelView({ rates: network.rates, chose: (mode) => setNetwork(mode) });
  const setNetwork = (mode) => {
    network.mode = mode;
    keepNetwork();
    panel.show(mode);
    shell.do((one, now) => (mode === "off" ? one.switchOff() : one.switchOn(now)));
    changed();
  };
  byId("rates").addEventListener("change", keepNetwork);

  // Successful polls are not shown in the panel.
  const api = new Api(name, (told) => (told.method !== "GET" || told.status >= 400) && panel.tell(told));
  const shell = new Shell({
    protocol,
    store,
    api,
    url: `${location.origin.replace(/^http/, "ws")}/v1/chat`,
    rates: () => (network.mode === "bad" ? network.rates : GOOD),
    changed: () => changed(),
    tell: (told) => panel.tell(told),
    trouble: (text) => notice(text),
  });

  // --- chats

  let enteredEpoch = null; // a log with a different epoch has a different lobby
  const ask = async (what) => {
    notice("");
    try {
      await what();
    } catch (error) {
      const isAway = error instanceof TypeError;
      notice(isAway ? "The server is unreachable. Try again later." : error.message);
    }
  };
  const look = () => shell.do((one) => one.look());

  // Enter the chat in the page's address: the keeper adds the visitor to the lobby, and any other new chat is created.
  const enter = async (chatId) => {
    try {
      if (chatId === LOBBY) await api.enterLobby();
      else await api.create(chatId);
      look();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      const isForeign = error.code === "NOT_A_MEMBER";
      notice(isForeign ? `You are not a member of “${chatId}”. Ask an owner to invite ${name}.` : error.message);
    }
  };
  shell.listed = (chats) => {
    const ours = new Set(chats.map((chat) => chat.chat_id));
    if (enteredEpoch === protocol.epoch) return;
    enteredEpoch = protocol.epoch;
    for (const chatId of new Set([LOBBY, asked])) {
      if (!ours.has(chatId)) enter(chatId).catch(() => (enteredEpoch = null)); // the server has become unreachable again
    }
  };

  const open = (chatId) => {
    protocol.openRoom = chatId;
    composer.show(chatId);
    notice("");
    history.replaceState(null, "", `/chat?${new URLSearchParams({ name, chat: chatId })}`);
    changed();
  };

  // --- views

  const messages = new MessagesView({
    again: (id) => shell.do((one, now) => one.again(id, now)),
    discard: (id) => shell.do((one) => one.discard(id)),
  });
  const chats = new ChatsView({ open: (chatId) => (open(chatId), composer.focus()) });
  const composer = new Composer({
    submit: (text) => {
      shell.do((one, now) => one.submit(protocol.openRoom, text, now));
      messages.toEnd();
    },
  });
  const members = new MembersView({
    remove: (user) => ask(() => api.removeMember(protocol.openRoom, user)).then(look),
    makeOwner: (user) => ask(() => api.makeOwner(protocol.openRoom, user)).then(look),
  });
  const seen = new Map(); // chat → the last sequence that the visitor has seen

  const draw = () => {
    const chatId = protocol.openRoom;
    const room = protocol.rooms.get(chatId);
    const entries = entriesOf(protocol, chatId, SILENT);
    announceNew(chatId, entries);
    messages.draw(chatId, entries);
    const ids = new Set([LOBBY, ...protocol.rooms.keys(), ...protocol.outbox.items.map((item) => item.chat_id), chatId]);
    chats.draw([...ids].map((id) => summary(id, id === chatId)));
    const waiting = protocol.outbox.items.filter((item) => !item.failed).length;
    setText(byId("title"), chatId);
    setText(byId("members"), room ? membersText(room.members.keys(), protocol.me, SILENT) : "");
    setText(byId("state"), `${STATES[protocol.state]}${network.mode === "bad" ? " · bad network" : ""}`);
    byId("state").dataset.state = protocol.state;
    setText(byId("waiting"), waiting ? `${waiting} waiting to be sent. ` : "");
    setText(byId("empty"), emptiness(room));
    byId("empty").hidden = room !== undefined && entries.length > 0;
    byId("earlier").hidden = !(room?.floor > 0);
    byId("manage").hidden = !room;
    members.draw({ room, me: protocol.me });
    panel.draw({ room, me: protocol.me, entries, silent: SILENT });
    if (protocol.state === "refused") notice(`The server refuses the connection of ${name}: ${protocol.problem}`);
  };

  const emptiness = (room) => {
    if (room) return room.isCaughtUp ? "Nothing has been written here yet." : "";
    const isStranger = protocol.state === "live" && enteredEpoch === protocol.epoch;
    return isStranger ? "You are not a member of this chat. What you write here waits until somebody invites you." : "";
  };

  const summary = (id, isOpen) => {
    const room = protocol.rooms.get(id);
    const entries = entriesOf(protocol, id, SILENT);
    const last = room?.shownTo ?? 0;
    if (isOpen || !seen.has(id)) seen.set(id, last);
    const unread = entries.filter((entry) => !entry.isMine && entry.sequence > seen.get(id)).length;
    return { chatId: id, last: entries.at(-1), unread, isOpen };
  };

  // Screen readers announce new messages from other members, but not messages that were already shown.
  const announced = new Map();
  const announceNew = (chatId, entries) => {
    const room = protocol.rooms.get(chatId);
    if (!room?.isCaughtUp) return;
    const before = announced.get(chatId) ?? room.shownTo;
    announced.set(chatId, room.shownTo);
    const fresh = entries.filter((entry) => !entry.isMine && entry.sequence > before && entry.sequence <= room.shownTo);
    if (fresh.length) setText(byId("announcer"), fresh.map((entry) => `${nameOf(entry.sender)}: ${entry.content}`).join("\n"));
  };

  let isDue = false;
  const changed = () => {
    if (isDue) return;
    isDue = true;
    setTimeout(() => {
      isDue = false;
      draw();
    });
  };
  const notice = (text) => {
    setText(byId("notice"), text);
    byId("notice").hidden = !text;
  };

  // --- forms

  const onSubmit = (id, field, act) =>
    byId(id).addEventListener("submit", (event) => {
      event.preventDefault();
      const value = byId(field).value.trim();
      if (value) ask(() => act(value)).then(() => (byId(field).value = ""));
    });
  onSubmit("create", "new-chat", async (chatId) => {
    await api.create(chatId);
    look();
    open(chatId);
  });
  const close = () => {
    if (byId("manage").contains(document.activeElement)) composer.focus();
    byId("manage").open = false;
  };
  byId("manage").addEventListener("keydown", ({ key }) => key === "Escape" && close());
  onSubmit("invite", "guest", async (guest) => {
    await api.invite(protocol.openRoom, `user:${guest}`);
    look();
    close();
  });
  byId("leave").addEventListener("click", () =>
    ask(async () => {
      await api.removeMember(protocol.openRoom, protocol.me);
      look();
      close();
      open(LOBBY);
    }),
  );
  byId("earlier").addEventListener("click", () =>
    ask(async () => {
      const { chatId, floor } = protocol.rooms.get(protocol.openRoom);
      const found = await api.before(chatId, floor + 1, OLDER);
      const lowest = found.length < OLDER ? 0 : Math.min(...found.map(({ sequence }) => sequence)) - 1;
      shell.do((one) => one.recalled(chatId, found, lowest));
    }),
  );

  setText(byId("me"), name);
  document.title = `${name} · Oncelog chat`;
  panel.show(network.mode);
  open(asked);
  if (network.mode === "off") protocol.switchOff();
  byId("app").hidden = false;
  composer.focus();
  shell.start();
};

startTheme();
const visitor = welcome();
if (visitor) {
  keepPage();
  await start(visitor.name, visitor.chat ?? LOBBY);
}
