// Who comes, and how the page stays when the server goes.
import { KEEPER } from "./api.mjs";
import { byId, setText } from "./dom.mjs";

const NAME = /^[A-Za-z0-9._-]{1,64}$/;
const NAMES = ["ann", "bob", "eve", "kim", "leo", "mia", "noa", "sam", "tom", "zoe"];
const PANEL_WIDTH_PX = 1100; // from then on there is room for it

// The visitor's name and chat; without a name, the page asks for one.
export const welcome = () => {
  const asked = new URLSearchParams(location.search);
  const name = asked.get("name") ?? "";
  if (!NAME.test(name) || name === KEEPER) {
    byId("welcome").hidden = false;
    byId("name").value = NAMES[Math.floor(Math.random() * NAMES.length)];
    byId("name").select();
    return null;
  }
  showSecond(name);
  preparePanel();
  return { name, chat: asked.get("chat") || undefined };
};

const showSecond = (name) => {
  const other = name === "bob" ? "ann" : "bob";
  const link = byId("second");
  setText(link, `Second window as ${other}`);
  link.href = `/chat?${new URLSearchParams({ name: other })}`;
};

const preparePanel = () => {
  const toggle = byId("panel-toggle");
  const show = (isOpen) => {
    byId("panel").hidden = !isOpen;
    byId("app").classList.toggle("with-panel", isOpen);
    toggle.setAttribute("aria-expanded", String(isOpen));
  };
  toggle.addEventListener("click", () => show(byId("panel").hidden));
  byId("panel-close").addEventListener("click", () => {
    show(false);
    toggle.focus();
  });
  byId("panel").addEventListener("keydown", ({ key }) => key === "Escape" && byId("panel-close").click());
  show(innerWidth >= PANEL_WIDTH_PX);
};

// A worker keeps the page's files: it can be loaded again while the server is away. Browsers that know trusted types are
// told not to take any string for a script's address but this one.
export const keepPage = () => {
  const address = "/chat/worker.js";
  const policy = globalThis.trustedTypes?.createPolicy("oncelog-worker", { createScriptURL: () => address });
  navigator.serviceWorker?.register(policy ? policy.createScriptURL(address) : address, { scope: "/chat" }).catch(() => {
    // Without it everything works but loading the page while the server is away.
  });
};
