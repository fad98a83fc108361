// A client in Node: commands on standard input, one a line; what it tells on standard output.
import { webcrypto } from "node:crypto";
import { createInterface } from "node:readline";
import * as insieme from "insieme/client";
import WebSocket from "ws";
import { drive } from "./driver.mjs";

globalThis.crypto ??= webcrypto; // the package needs it, and Node 18 has it under another name

const run = drive({
  insieme,
  WebSocketImpl: WebSocket,
  makeStore: () => insieme.createInMemoryClientStore(),
  say: (told) => process.stdout.write(`${JSON.stringify(told)}\n`),
});

createInterface({ input: process.stdin })
  .on("line", (line) => run(JSON.parse(line)))
  .on("close", () => process.exit(0));
