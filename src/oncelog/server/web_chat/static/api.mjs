// What is asked over HTTP: chats, members, older messages. In development mode a name is a credential.

// The lobby has a keeper, who made it, greets and lets everybody in. That is no rule of the server's: a chat is open to its
// members alone, and one of them has to let others in. The page asks the keeper in the keeper's own name, which works only
// where a plain name is a credential, in development mode.
export const LOBBY = "lobby";
export const KEEPER = "doorkeeper";
const GREETINGS = [
  // Their ids are fixed, so that they are there once, however many visitors come first at the same time.
  [
    "6f1d7a52-0c7e-4b57-9a55-3f3b1c1e0a01",
    "Welcome to the lobby. Open a second window as somebody else, and write to each other.",
  ],
  [
    "6f1d7a52-0c7e-4b57-9a55-3f3b1c1e0a02",
    "Then make the network bad, or stop the server, and go on writing: nothing gets lost, and nothing comes twice.",
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
  // `tell` gets every question with its answer, for the panel.
  constructor(name, tell = () => {}) {
    this.name = name;
    this.tell = tell;
  }

  // All chats of ours.
  async chats() {
    return this.#pages(path(), "chats");
  }

  // All members of a chat, with the role of each and the last sequence that it has.
  async members(chatId) {
    return this.#pages(path(chatId, "delivery"), "members");
  }

  async create(chatId, members = [], name = this.name) {
    return this.#call("POST", path(), { chat_id: chatId, members }, name);
  }

  async invite(chatId, user) {
    await this.#call("PUT", path(chatId, "members", user));
  }

  // An owner removes a member; every member may remove itself.
  async removeMember(chatId, user) {
    await this.#call("DELETE", path(chatId, "members", user));
  }

  // The server refuses a user that has left meanwhile.
  async makeOwner(chatId, user) {
    await this.#call("PUT", path(chatId, "members", user), { role: "owner", only_if_member: true });
  }

  // The messages below a sequence, the newest of them.
  async before(chatId, sequence, limit) {
    const query = new URLSearchParams({ before: String(sequence), limit: String(limit) });
    return (await this.#call("GET", `${path(chatId, "messages")}?${query}`)).messages;
  }

  // The keeper lets one in, and makes the lobby if there is none.
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
