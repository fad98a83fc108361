// The visitor's name, the panel's initial state, and the service worker that keeps the page available offline.
import { KEEPER } from "./api.mjs";
import { byId, setText } from "./dom.mjs";

const NAME = /^[A-Za-z0-9._-]{1,64}$/;
const NAMES = ["ann", "bob", "eve", "kim", "leo", "mia", "noa", "sam", "tom", "zoe"];
const PANEL_WIDTH_PX = 1100; // narrowest window in which the panel is open at first

// Return the name and the chat in the address. Without a valid name, show the name form and return null.
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

// Register the service worker, which caches the page's files for times when the server is unreachable. With trusted types, the
// browser accepts no other script address.
export const keepPage = () => {
  const address = "/chat/worker.js";
  const policy = globalThis.trustedTypes?.createPolicy("oncelog-worker", { createScriptURL: () => address });
  navigator.serviceWorker?.register(policy ? policy.createScriptURL(address) : address, { scope: "/chat" }).catch(() => {
    // Without a service worker everything works, except loading the page while the server is unreachable.
  });
};
