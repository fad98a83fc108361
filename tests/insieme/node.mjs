// A client in Node: one command per line on standard input, and reports on standard output.
import { webcrypto } from "node:crypto";
import { createInterface } from "node:readline";
import * as insieme from "insieme/client";
import WebSocket from "ws";
import { drive } from "./driver.mjs";

globalThis.crypto ??= webcrypto; // required by the package; Node 18 has it under a different name

const run = drive({
  insieme,
  WebSocketImpl: WebSocket,
  makeStore: () => insieme.createInMemoryClientStore(),
  say: (told) => process.stdout.write(`${JSON.stringify(told)}\n`),
});

createInterface({ input: process.stdin })
  .on("line", (line) => run(JSON.parse(line)))
  .on("close", () => process.exit(0));
