// Seeded random simulation: pages on bad networks, a server that is killed, and pages that are reloaded. In the end all
// pages show every message once and in the same order, and the messages of each writer in the order of writing.
import assert from "node:assert/strict";
import test from "node:test";
import { World, audit, chance } from "./world.mjs";

const SEEDS = Number(process.env.CHAT_SEEDS ?? 60);
const FIRST = Number(process.env.CHAT_FIRST_SEED ?? 1);
const NAMES = ["ann", "bob", "eve"];

const story = (seed) => {
  const world = new World(seed);
  const random = chance(seed * 7919);
  world.server.chat("lobby", ...NAMES);
  world.server.chat("tea", "ann", "bob");
  const pages = NAMES.map((name) => world.page(name));
  const rates = { drop: random() * 0.4, duplicate: random() * 0.4, reorder: random() * 0.5, delayMs: random() * 600 };
  for (const page of pages) page.rates = rates;
  const written = { ann: [], bob: [], eve: [] };
  let seen = new Map();
  const check = () => {
    for (const page of pages) {
      // Messages of others keep their order, and new ones are appended. Only own messages are shown beyond a gap.
      const foreign = page.entries().filter((entry) => !entry.isMine).map((entry) => entry.key);
      const before = seen.get(page.name) ?? [];
      assert.deepEqual(foreign.slice(0, before.length), before, `seed ${seed}: ${page.name} showed a different order before`);
      seen.set(page.name, foreign);
    }
  };
  for (let step = 0; step < 60; step += 1) {
    const page = pages[Math.floor(random() * pages.length)];
    const dice = random();
    if (dice < 0.7) {
      const text = `${page.name} ${step}`;
      written[page.name].push(text);
      page.write(text);
    } else if (dice < 0.76) page.reload();
    else if (dice < 0.82) world.server.isUp ? world.server.stop() : world.server.restart();
    else if (dice < 0.88) page.do((protocol, now) => (protocol.state === "off" ? protocol.switchOn(now) : protocol.switchOff()));
    else if (dice < 0.94 && page.name !== "eve") page.write(`tea ${step}`, "tea");
    world.clock.pass(random() * 1500);
    check();
  }
  world.server.restart();
  for (const page of pages) page.do((protocol, now) => protocol.switchOn(now));
  const total = Object.values(written).flat().length;
  const isDone = () => pages.every((page) => page.protocol.outbox.items.length === 0 && page.texts().length === total);
  assert.ok(world.clock.run(isDone), `seed ${seed}: ${pages.map((page) => page.texts().length)} of ${total}`);
  check();
  const orders = pages.map((page) => page.entries().map(({ sequence, messageId, key, content }) => ({
    sequence, message_id: messageId, client_message_id: key, content,
  })));
  for (const order of orders) assert.deepEqual(order, orders[0], `seed ${seed}`);
  assert.deepEqual([audit(orders[0]).missing, audit(orders[0]).doubled], [0, 0]);
  for (const page of pages) {
    assert.deepEqual(page.entries().filter(({ isMine }) => isMine).map(({ content }) => content), written[page.name]);
  }
  // Every page learns that every message has been delivered.
  const isDelivered = () => pages.every((page) => page.entries().every(({ mark }) => mark === null || mark === "delivered"));
  assert.ok(world.clock.run(isDelivered), `seed ${seed}: marks`);
};

for (let seed = FIRST; seed < FIRST + SEEDS; seed += 1) test(`story ${seed}`, () => story(seed));
