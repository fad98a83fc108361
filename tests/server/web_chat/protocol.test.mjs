// Cases of the page's protocol. Run with `node --test`; CHAT_PAGE is the directory of the page's files.
import assert from "node:assert/strict";
import test from "node:test";
import { BAD, GOOD, Line, Room, World, audit, fate, markText } from "./world.mjs";

const pair = (seed) => {
  const world = new World(seed);
  world.server.chat("lobby", "ann", "bob");
  const [ann, bob] = [world.page("ann"), world.page("bob")];
  assert.ok(world.clock.run(() => ann.protocol.state === "live" && bob.protocol.state === "live"));
  assert.ok(world.clock.run(() => [ann, bob].every((one) => one.protocol.rooms.get("lobby")?.members.size === 2)));
  return { world, ann, bob };
};
const marks = (page) => page.entries().map(({ mark }) => mark);
const all = (world, ...pages) => (count) =>
  world.clock.run(() =>
    pages.every((page) => page.entries().length === count && page.entries().every(({ sequence }) => sequence !== null)),
  );

test("a message is shown immediately, and its mark shows its progress", () => {
  const { world, ann, bob } = pair();
  ann.write("hello");
  assert.deepEqual(marks(ann), ["pending"]);
  assert.ok(world.clock.run(() => marks(ann)[0] === "sent"));
  assert.equal(ann.entries()[0].sequence, 1);
  assert.ok(world.clock.run(() => marks(ann)[0] === "delivered"));
  assert.deepEqual(bob.texts(), ["hello"]);
  assert.equal(bob.entries()[0].mark, null);
  assert.equal(ann.kept.has("outbox ann-1"), false);
});

test("a message is marked delivered when all others have it; until then they are counted", () => {
  const { world, ann } = pair();
  world.server.chat("lobby", "carl");
  ann.write("hello");
  assert.ok(world.clock.run(() => marks(ann)[0] === "reached"));
  assert.equal(markText(ann.entries()[0]), "delivered to 1 of 2");
});

test("messages written while the server is down survive a reload and arrive once and in order", () => {
  const { world, ann, bob } = pair();
  world.server.stop();
  for (const text of ["one", "two", "three"]) ann.write(text);
  ann.reload();
  assert.deepEqual(ann.texts(), ["one", "two", "three"]);
  assert.deepEqual(marks(ann), ["pending", "pending", "pending"]);
  bob.write("from bob");
  world.clock.pass(5000);
  assert.deepEqual(ann.texts(), ["one", "two", "three"]);
  world.server.restart();
  assert.ok(all(world, ann, bob)(4));
  assert.deepEqual(ann.texts(), bob.texts());
  assert.deepEqual(ann.texts().filter((text) => text !== "from bob"), ["one", "two", "three"]);
});

test("after a reconnect the page syncs before it sends", () => {
  const { world, ann, bob } = pair();
  ann.do((protocol) => protocol.switchOff());
  for (let count = 0; count < 250; count += 1) bob.write(`bob ${count}`);
  assert.ok(world.clock.run(() => world.server.chat("lobby").messages.length === 250));
  ann.write("late");
  ann.history.length = 0;
  ann.do((protocol, now) => protocol.switchOn(now));
  const counts = new Set();
  assert.ok(
    world.clock.run(() => {
      counts.add(ann.entries().filter(({ isMine }) => !isMine).length);
      return marks(ann).at(-1) !== "pending";
    }),
  );
  const types = ann.history.map(({ type }) => type);
  assert.deepEqual(types.slice(0, 4), ["connect", "sync_request", "sync_request", "sync_request"]);
  assert.ok(types.indexOf("send_message") > types.lastIndexOf("sync_request"));
  assert.deepEqual([...counts], [0, 250], "a partial catch-up of three pages is not shown");
});

test("a message whose answer was lost is sent again under the same id", () => {
  const { world, ann } = pair();
  const session = [...world.server.sessions].find((one) => one.user === "user:ann");
  const send = session.send;
  let answers = 0;
  session.send = (frame) => {
    if (frame.type === "send_message_ack" && (answers += 1) > 1) send(frame); // no other frame tells the page about the commit
  };
  ann.write("hello");
  assert.ok(world.clock.run(() => marks(ann)[0] !== "pending"));
  const sent = world.server.log.filter(({ type }) => type === "send_message");
  assert.deepEqual(new Set(sent.map((frame) => frame.client_message_id)), new Set(["ann-1"]));
  assert.equal(world.server.chat("lobby").messages.length, 1);
  assert.equal(ann.entries()[0].attempts, sent.length);
  assert.equal(ann.entries()[0].isDuplicate, true);
});

test("messages that arrive out of order are shown in sequence order, and the page asks for missing ones", () => {
  const { world, ann, bob } = pair();
  const session = [...world.server.sessions].find((one) => one.user === "user:ann");
  const send = session.send;
  session.send = (frame) => (frame.type === "message" && frame.sequence === 2 ? null : send(frame));
  for (const text of ["one", "two", "three"]) bob.write(text);
  assert.ok(world.clock.run(() => ann.protocol.rooms.get("lobby").held === 1));
  assert.deepEqual(ann.texts(), ["one"]);
  assert.ok(world.clock.run(() => ann.texts().length === 3, 500), "it asks before its next periodic sync");
  assert.deepEqual(ann.texts(), ["one", "two", "three"]);
});

test("a lost last message is found even if no message follows it", () => {
  const { world, ann, bob } = pair();
  const session = [...world.server.sessions].find((one) => one.user === "user:ann");
  const send = session.send;
  session.send = (frame) => (["message", "delivery"].includes(frame.type) ? null : send(frame));
  bob.write("lost");
  assert.ok(world.clock.run(() => ann.texts().length === 1, 3000), "by asking on the socket, before it polls over HTTP");
});

test("a page that sees its own message in the chat needs no other answer", () => {
  const { world, ann } = pair();
  const session = [...world.server.sessions].find((one) => one.user === "user:ann");
  const send = session.send;
  session.send = (frame) => (frame.type === "send_message_ack" ? null : send(frame));
  ann.write("hello");
  assert.ok(world.clock.run(() => ann.protocol.outbox.items.length === 0, 20_000));
  assert.deepEqual(ann.texts(), ["hello"]);
});

test("copies of old answers have no effect", () => {
  const { world, ann, bob } = pair();
  bob.write("one");
  assert.ok(all(world, ann)(1));
  const room = ann.protocol.rooms.get("lobby");
  const batch = { type: "message_batch", chat_id: "lobby", messages: [], last_sequence: 1 };
  ann.do((protocol, now) => protocol.received({ ...batch, request_id: "sync-0", has_more: true, next_sequence: 9 }, now));
  assert.deepEqual([room.cursor, room.isCaughtUp], [1, true]);
  const delivery = { type: "delivery", chat_id: "lobby", user_id: "user:bob", last_acked_sequence: 0 };
  room.members.set("user:bob", 1);
  ann.do((protocol, now) => protocol.received(delivery, now));
  assert.equal(room.members.get("user:bob"), 1);
  ann.history.length = 0;
  const connected = { type: "connected", user_id: "user:ann", epoch: "epoch-1" };
  ann.do((protocol, now) => protocol.received(connected, now));
  assert.deepEqual([ann.history, ann.protocol.state], [[], "live"]);
  room.cover(5, 9, false, 0); // the answer to a request from before the room was reset
  assert.equal(room.cursor, 1);
});

test("the user's own message is shown once it is answered, even after a gap", () => {
  const room = new Room("lobby");
  room.isCaughtUp = true;
  const message = (sequence, sender_id) => ({ sequence, sender_id, client_message_id: `${sequence}` });
  assert.ok(room.add(message(3, "user:ann"), 0));
  assert.ok(room.add(message(4, "user:bob"), 0));
  assert.equal(room.add(message(4, "user:bob"), 0), false);
  assert.deepEqual(room.shown("user:ann").map(({ sequence }) => sequence), [3]);
  assert.equal(room.held, 2);
  room.cover(0, 2, false, 0); // the server does not have 1 and 2: a gap is not an error
  assert.deepEqual(room.shown("user:ann").map(({ sequence }) => sequence), [3, 4]);
  assert.equal(room.cursor, 4);
});

test("a permanently refused message shows the reason, and can be sent again or discarded", () => {
  const { world, ann } = pair();
  world.server.chat("lobby").members.delete("user:ann");
  const id = ann.write("hello");
  assert.ok(world.clock.run(() => marks(ann)[0] === "failed"));
  assert.equal(ann.entries()[0].failed.code, "NOT_A_MEMBER");
  assert.equal(ann.kept.get(`outbox ${id}`).failed.code, "NOT_A_MEMBER");
  world.server.chat("lobby", "ann");
  ann.do((protocol) => protocol.look());
  assert.ok(world.clock.run(() => ann.protocol.rooms.get("lobby")?.isCaughtUp));
  ann.do((protocol, now) => protocol.again(id, now));
  assert.ok(world.clock.run(() => ann.entries()[0]?.sequence === 1));
  const other = ann.do((protocol, now) => protocol.submit("nowhere", "hello", now));
  ann.do((protocol) => protocol.discard(other));
  assert.equal(ann.kept.has(`outbox ${other}`), false);
});

test("a rate-limited page waits for the requested delay", () => {
  const { world, ann } = pair();
  const receive = world.server.receive;
  const asked = [];
  world.server.receive = function (session, frame) {
    if (frame.type !== "send_message") return receive.call(this, session, frame);
    asked.push(world.clock.now);
    if (asked.length > 1) return receive.call(this, session, frame);
    const { client_message_id } = frame;
    return session.send({ type: "error", code: "RATE_LIMITED", message: "slowly", client_message_id, retry_after_ms: 5000 });
  };
  ann.write("hello");
  assert.ok(world.clock.run(() => marks(ann)[0] !== "pending"));
  assert.equal(asked.length, 2);
  assert.ok(asked[1] - asked[0] >= 5000);
});

test("after a planned close the page waits for the server's reconnect delay", () => {
  const { world, ann } = pair();
  const session = [...world.server.sessions].find((one) => one.user === "user:ann");
  session.send({ type: "connection_closing", reason: "upgrade", reconnect_delay_ms: 9000 });
  world.clock.pass(10);
  session.close();
  world.clock.pass(8900);
  assert.equal(ann.protocol.state, "offline");
  assert.ok(world.clock.run(() => ann.protocol.state === "live", 2000));
});

test("a new log discards the messages of the old one but keeps pending messages", () => {
  const { world, ann, bob } = pair();
  ann.write("old");
  assert.ok(all(world, ann, bob)(1));
  world.server.stop();
  ann.write("waits");
  world.server.epoch = "epoch-2";
  world.server.chats.clear();
  const lobby = world.server.chat("lobby", "ann", "bob", "eve");
  const eve = world.page("eve");
  world.server.restart();
  for (const text of ["new 1", "new 2"]) eve.write(text);
  ann.do((protocol) => protocol.switchOff());
  assert.ok(world.clock.run(() => lobby.messages.length === 2));
  ann.do((protocol, now) => protocol.switchOn(now));
  assert.ok(all(world, ann, bob)(3));
  for (const page of [ann, bob]) assert.deepEqual(page.texts(), ["new 1", "new 2", "waits"]);
});

test("a cursor ahead of the chat resets the chat", () => {
  const { world, ann, bob } = pair();
  for (const text of ["one", "two"]) bob.write(text);
  assert.ok(all(world, ann)(2));
  world.server.stop();
  const chat = world.server.chat("lobby");
  chat.messages.pop();
  world.server.restart();
  assert.ok(world.clock.run(() => ann.protocol.state === "live" && ann.texts().join() === "one"));
});

test("a page whose credential is refused stops connecting", () => {
  const world = new World();
  world.server.receive = (session) => session.send({ type: "error", code: "AUTH_FAILED", message: "no" });
  const ann = world.page("ann");
  assert.ok(world.clock.run(() => ann.protocol.state === "refused"));
  world.clock.pass(60_000);
  assert.deepEqual([ann.protocol.state, ann.protocol.problem], ["refused", "no"]);
});

test("a silent connection is closed and replaced", () => {
  const { world, ann } = pair();
  for (const session of world.server.sessions) session.send = () => {};
  assert.ok(world.clock.run(() => ann.protocol.state === "offline", 60_000));
  assert.ok(world.clock.run(() => ann.protocol.state === "live", 60_000));
});

test("a user who joins a long chat gets its newest messages, and can load older ones", () => {
  const { world, bob } = pair();
  for (let count = 0; count < 300; count += 1) bob.write(`bob ${count}`);
  assert.ok(world.clock.run(() => world.server.chat("lobby").messages.length === 300));
  world.server.chat("lobby", "carl");
  const carl = world.page("carl");
  assert.ok(world.clock.run(() => carl.entries().length === 200));
  const room = carl.protocol.rooms.get("lobby");
  assert.deepEqual([room.floor, carl.entries()[0].sequence], [100, 101]);
  carl.do((protocol) => protocol.recalled("lobby", world.server.chat("lobby").messages.slice(0, 100), 0));
  assert.equal(carl.entries().length, 300);
  carl.reload();
  assert.equal(carl.entries().length, 300);
});

test("a chat appears when the user is invited, and disappears when the user is removed", () => {
  const { world, ann, bob } = pair();
  world.server.chat("tea", "ann", "bob");
  world.server.tell("tea", { type: "membership", chat_id: "tea", user_id: "user:bob", present: true });
  assert.ok(world.clock.run(() => bob.protocol.rooms.get("tea")?.isCaughtUp));
  ann.write("milk?", "tea");
  assert.ok(world.clock.run(() => bob.texts("tea").join() === "milk?"));
  world.server.tell("tea", { type: "membership", chat_id: "tea", user_id: "user:bob", present: false });
  world.server.chat("tea").members.delete("user:bob");
  assert.ok(world.clock.run(() => !bob.protocol.rooms.has("tea")));
  assert.deepEqual([...bob.kept.keys()].filter((key) => key.includes("tea")), []);
});

test("the audit finds missing messages, duplicates and a different order", () => {
  const message = (sequence) => ({ sequence, message_id: `m${sequence}`, client_message_id: `c${sequence}`, content: "x" });
  const whole = [1, 2, 3].map(message);
  assert.deepEqual([audit(whole).missing, audit(whole).doubled], [0, 0]);
  assert.equal(audit([message(1), message(3)]).missing, 1);
  assert.equal(audit([...whole, { ...message(4), client_message_id: "c3" }]).doubled, 1);
  assert.notEqual(audit(whole).fingerprint, audit([message(2), message(1), message(3)]).fingerprint);
  assert.equal(audit([]).missing, 0);
  const leapt = [1, 2, 1_000_020, 1_000_022].map(message); // a restore skipped the sequences in between
  assert.equal(audit(leapt).missing, 1);
});

test("a good network passes frames unchanged; a bad one drops, duplicates and reorders them", () => {
  const numbers = (...given) => () => given.shift() ?? 0.99;
  assert.deepEqual(fate(GOOD, 0, Math.random).arrivals, [0]);
  assert.equal(fate(BAD, 0, numbers(0.1)).isDropped, true);
  const doubled = fate(BAD, 40, numbers(0.9, 0.1, 0.9, 0.1, 0.5));
  assert.deepEqual([doubled.arrivals, doubled.isDoubled], [[40, 290], true]); // a copy does not overtake the frame before it
  const late = fate(BAD, 0, numbers(0.9, 0.9, 0.1, 0.5));
  assert.deepEqual([late.arrivals, late.isReordered], [[500], true]);
});

test("frames in flight when a connection closes do not arrive", () => {
  const arrived = [];
  const waiting = [];
  const line = new Line({
    rates: () => ({ ...GOOD, delayMs: 100 }),
    deliver: (frame) => arrived.push(frame),
    tell: () => {},
    random: () => 0.5,
    now: () => 0,
    later: (what) => waiting.push(what),
  });
  line.carry("one");
  waiting.shift()();
  line.carry("two");
  line.close();
  waiting.shift()();
  assert.deepEqual(arrived, ["one"]);
});
