// The message input, which keeps a draft for each chat.
import { byId, setText } from "./dom.mjs";

const BYTES_MAX = 4096; // longest message (CH-10)
const HEIGHT_PX_MAX = 160;
const KEYS = "Enter sends, Shift+Enter adds a new line";

export class Composer {
  constructor({ submit }) {
    this.text = byId("text");
    this.drafts = new Map();
    this.chatId = null;
    byId("compose").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.text.value.trim() || this.#bytes() > BYTES_MAX) return;
      submit(this.text.value.trim());
      this.text.value = "";
      this.#fit();
    });
    this.text.addEventListener("input", () => this.#fit());
    this.text.addEventListener("keydown", (event) => {
      // While the user composes a character (in Japanese, Chinese or Korean), Enter only completes the composition.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("compose").requestSubmit();
    });
  }

  show(chatId) {
    this.drafts.set(this.chatId, this.text.value);
    this.chatId = chatId;
    this.text.value = this.drafts.get(chatId) ?? "";
    this.#fit();
  }

  focus() {
    this.text.focus();
  }

  #bytes() {
    return new TextEncoder().encode(this.text.value.trim()).length;
  }

  #fit() {
    const bytes = this.#bytes();
    const isTooLong = bytes > BYTES_MAX;
    setText(byId("keys"), bytes > BYTES_MAX * 0.8 ? `${bytes} of ${BYTES_MAX} bytes` : KEYS);
    byId("send").disabled = isTooLong;
    this.text.setAttribute("aria-invalid", String(isTooLong));
    this.text.style.height = "auto";
    this.text.style.height = `${Math.min(this.text.scrollHeight + 2, HEIGHT_PX_MAX)}px`;
  }
}
