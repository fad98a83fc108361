// Client of the Chat API over HTTP, for chats, members and older messages. In development mode a name is a credential.

// The keeper is the user that creates the lobby, greets visitors and adds them as members. This is not a feature of the server,
// where only owners can add users to a chat: the page sends these requests under the keeper's name, which works only in
// development mode.
export const LOBBY = "lobby";
export const KEEPER = "doorkeeper";
const GREETINGS = [
  // Fixed ids ensure that each greeting is committed once, even if several visitors create the lobby at the same time.
  [
    "6f1d7a52-0c7e-4b57-9a55-3f3b1c1e0a01",
    "Welcome to the lobby. Open a second window under another name, and write messages in both.",
  ],
  [
    "6f1d7a52-0c7e-4b57-9a55-3f3b1c1e0a02",
    "Then choose a bad network or stop the server, and continue writing: no message is lost, and none arrives twice.",
  ],
];

export class ApiError extends Error {
  constructor(status, { code, message }) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const path = (...parts) => `/v1/chats${parts.map((part) => `/${encodeURIComponent(part)}`).join("")}`;

export class Api {
  // `tell` receives every request with its answer, to show them in the panel.
  constructor(name, tell = () => {}) {
    this.name = name;
    this.tell = tell;
  }

  // Return all of the visitor's chats.
  async chats() {
    return this.#pages(path(), "chats");
  }

  // Return all members of a chat with their roles and watermarks.
  async members(chatId) {
    return this.#pages(path(chatId, "delivery"), "members");
  }

  async create(chatId, members = [], name = this.name) {
    return this.#call("POST", path(), { chat_id: chatId, members }, name);
  }

  async invite(chatId, user) {
    await this.#call("PUT", path(chatId, "members", user));
  }

  // Owners can remove members, and every member can leave.
  async removeMember(chatId, user) {
    await this.#call("DELETE", path(chatId, "members", user));
  }

  // The server refuses this for a user that is no longer a member.
  async makeOwner(chatId, user) {
    await this.#call("PUT", path(chatId, "members", user), { role: "owner", only_if_member: true });
  }

  // Return the newest messages below a sequence.
  async before(chatId, sequence, limit) {
    const query = new URLSearchParams({ before: String(sequence), limit: String(limit) });
    return (await this.#call("GET", `${path(chatId, "messages")}?${query}`)).messages;
  }

  // Add the visitor to the lobby, under the keeper's name. Creates the lobby if it does not exist.
  async enterLobby() {
    const lobby = await this.create(LOBBY, [`user:${this.name}`], KEEPER);
    if (lobby.last_sequence > 0) return;
    for (const [id, content] of GREETINGS) {
      await this.#call("POST", path(LOBBY, "messages"), { client_message_id: id, content }, KEEPER);
    }
  }

  async #pages(url, what) {
    const found = [];
    let after = "";
    do {
      const page = await this.#call("GET", after ? `${url}?${new URLSearchParams({ after })}` : url);
      found.push(...page[what]);
      after = page.next_after;
    } while (after);
    return found;
  }

  async #call(method, url, body, name = this.name) {
    const response = await fetch(url, {
      method,
      headers: { Authorization: `Bearer ${name}`, ...(body ? { "Content-Type": "application/json" } : {}) },
      body: body && JSON.stringify(body),
    });
    const text = await response.text();
    const answer = text ? JSON.parse(text) : {};
    this.tell({ method, url, status: response.status, body, answer });
    if (!response.ok) throw new ApiError(response.status, answer.error ?? { code: "?", message: response.statusText });
    return answer;
  }
}
