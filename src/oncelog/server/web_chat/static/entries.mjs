// The entries that a chat displays: messages in order, then unsent messages, each with its mark. No I/O.

export const PENDING = "pending";
export const SENT = "sent"; // committed by the server
export const REACHED = "reached"; // received by some of the other members
export const DELIVERED = "delivered"; // received by all other members
export const FAILED = "failed";

// `silent` contains members that never acknowledge messages, such as the lobby's keeper.
export const entriesOf = (protocol, chatId, silent = new Set()) => {
  const room = protocol.rooms.get(chatId);
  const others = room ? [...room.members].filter(([user]) => user !== protocol.me && !silent.has(user)) : [];
  const committed = room ? room.shown(protocol.me).map((message) => committedEntry(protocol, message, others)) : [];
  return [...committed, ...protocol.outbox.of(chatId).map((item) => waitingEntry(protocol, item))];
};

const committedEntry = (protocol, message, others) => {
  const isMine = message.sender_id === protocol.me;
  const having = others.filter(([, acked]) => acked >= message.sequence).map(([user]) => user);
  return {
    key: message.client_message_id,
    sequence: message.sequence,
    messageId: message.message_id,
    sender: message.sender_id,
    content: message.content ?? "",
    isErased: message.content === null,
    at: message.created_at,
    isMine,
    mark: isMine ? markOf(having.length, others.length) : null,
    having,
    of: others.length,
    ...noteOf(protocol, message.client_message_id),
  };
};

const waitingEntry = (protocol, item) => ({
  key: item.client_message_id,
  sequence: null,
  messageId: null,
  sender: protocol.me,
  content: item.content,
  isErased: false,
  at: item.written_at,
  isMine: true,
  mark: item.failed ? FAILED : PENDING,
  having: [],
  of: 0,
  failed: item.failed,
  ...noteOf(protocol, item.client_message_id),
});

const noteOf = (protocol, id) => protocol.outbox.notes.get(id) ?? { attempts: 0, isDuplicate: false };

const markOf = (having, of) => (of && having === of ? DELIVERED : having ? REACHED : SENT);

// Return the text for a mark, for tooltips and screen readers.
export const markText = ({ mark, having, of }) =>
  ({
    [PENDING]: "waiting to be sent",
    [SENT]: "sent",
    [REACHED]: `delivered to ${having.length} of ${of}`,
    [DELIVERED]: "delivered",
    [FAILED]: "not sent",
  })[mark] ?? "";

export const nameOf = (user) => user.replace(/^(user|client):/, "");
