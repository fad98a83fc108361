// Checks an Oncelog proof. Written from docs/reference/proofs.md. Runs in Node 20 and in browsers, without packages.
//   node verify.mjs FILE                               exit status 0 if the proof holds, else 1
//   const { blockHash } = await verify(parse(json));   throws an Error if it does not hold
// Compare the block hash with one that you trust: any program can make up a block.

const refuse = (where, why) => { throw new Error(`${where}: ${why}`); };
const isSame = (one, other) => one.length === other.length && one.every((byte, index) => byte === other[index]);
const bytes = (...parts) => {
  const joined = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  parts.reduce((place, part) => (joined.set(part, place), place + part.length), 0);
  return joined;
};
const H = async (...parts) => new Uint8Array(await crypto.subtle.digest("SHA-256", bytes(...parts)));

// Each reader takes a member of the document and returns its number or its bytes. It throws for any other value.
const number = (bits) => (value, where) => {
  const whole = Number.isSafeInteger(value) ? BigInt(value) : value; // above 2^53 only a BigInt has all digits
  const fits = typeof whole === "bigint" && whole >= 0n && whole >> BigInt(bits) === 0n;
  return fits ? whole : refuse(where, `must be a whole number of at most ${bits} bits`);
};
const hex = (length) => (value, where) => {
  if (typeof value !== "string" || !/^(?:[0-9a-f]{2})*$/.test(value)) refuse(where, "must be lower-case hexadecimal");
  if (length !== undefined && value.length !== 2 * length) refuse(where, `must have ${length} bytes`);
  return Uint8Array.from(value.match(/../g) ?? [], (digits) => parseInt(digits, 16));
};
const text = (value, where) => {
  if (typeof value !== "string" || /\p{Surrogate}/u.test(value)) refuse(where, "must be text");
  return new TextEncoder().encode(value);
};
const base64 = (value, where) => {
  if (typeof value !== "string" || btoa(atob(value)) !== value) refuse(where, "must be base64");
  return Uint8Array.from(atob(value), (character) => character.charCodeAt(0));
};
const list = (reader) => (value, where) =>
  Array.isArray(value) ? value.map((one, index) => reader(one, `${where}[${index}]`)) : refuse(where, "must be a list");
const nullable = (reader) => (value, where) => (value === null ? null : reader(value, where));
const object = (members) => (value, where) => {
  if (typeof value !== "object" || value === null) refuse(where, "must be an object");
  if (!Object.keys(value).every((name) => Object.hasOwn(members, name))) refuse(where, "has an unknown member");
  return Object.fromEntries(Object.keys(members).map((name) => [name, members[name](value[name], `${where}.${name}`)]));
};
const NUMBERS = ["position", "sequence", "log_time_ms", "height", "client_sequence"];
const FRAMES = { policy: text, scope: text, key: hex(), fingerprint: hex(), actor: text, client: text };
const numbers = Object.fromEntries(NUMBERS.map((name) => [name, number(64)]));
const read = object({
  record: object({ lane: number(32), ...numbers, ...FRAMES, partitions: list(text) }),
  salt: nullable(hex(16)), body: nullable(base64), body_hash: hex(32),
  index: number(32), count: number(32), path: list(hex(32)),
  block: object({
    lane: number(32), height: number(64), first_position: number(64), count: number(32), timestamp_ms: number(64),
    previous_hash: hex(32), merkle_root: hex(32), hash: hex(32),
  }),
});

const big = (value, size) => hex(size)(value.toString(16).padStart(2 * size, "0"), "number");
const frame = (label, value) => bytes(text(label), big(value.length, 4), value);
const recordHeader = (record) => bytes([1], big(record.lane, 4), ...NUMBERS.map((name) => big(record[name], 8)),
  ...Object.keys(FRAMES).map((label) => frame(label, record[label])),
  ...record.partitions.map((partition) => frame("partition", partition)));
const blockHeader = (block) => bytes([1], big(block.lane, 4), big(block.height, 8), big(block.first_position, 8),
  big(block.count, 4), big(block.timestamp_ms, 8), block.previous_hash, block.merkle_root);

export function parse(json) { // JSON.parse rounds numbers above 2^53, so whole numbers become BigInts here
  const mark = crypto.randomUUID(); // no string of the document begins with it
  const marked = (one) => (one[0] === '"' ? one : `"${mark}${one}"`);
  const revived = (_, one) => (typeof one === "string" && one.startsWith(mark) ? BigInt(one.slice(mark.length)) : one);
  return JSON.parse(json.replace(/"(?:[^"\\]|\\.)*"|-?(?:0|[1-9]\d*)(?![\d.eE])/g, marked), revived);
}

export async function verify(document) {
  const { record, salt, body, body_hash, index, count, path, block } = read(document, "$");
  if (!isSame(await H([2], blockHeader(block)), block.hash)) refuse("$.block.hash", "does not match the block");
  if ((salt === null) !== (body === null)) refuse("$.salt", "must be null if, and only if, body is null");
  if (body && !isSame(await H(salt, body), body_hash)) refuse("$.body_hash", "does not match salt and body");
  for (const [name, its] of [["lane", "lane"], ["height", "height"], ["log_time_ms", "timestamp_ms"]])
    if (record[name] !== block[its]) refuse(`$.record.${name}`, "does not match the block");
  if (record.position !== block.first_position + index) refuse("$.record.position", "does not match the index");
  if (count !== block.count || index >= count) refuse("$.index", "or count does not match the block");
  let [reached, place, last] = [await H([0], recordHeader(record), body_hash), index, count - 1n];
  for (const sibling of path) {
    if (last === 0n) refuse("$.path", "is too long");
    const isFromTheRight = (place & 1n) === 1n || place === last;
    reached = await (isFromTheRight ? H([1], sibling, reached) : H([1], reached, sibling));
    while (isFromTheRight && !(place & 1n) && place) [place, last] = [place >> 1n, last >> 1n];
    [place, last] = [place >> 1n, last >> 1n];
  }
  if (last !== 0n || !isSame(reached, block.merkle_root)) refuse("$.path", "does not lead to the block's Merkle root");
  return { isErased: body === null, blockHash: document.block.hash };
}

const program = globalThis.process?.argv?.[1];
const [fs, url] = program ? [await import("node:fs"), await import("node:url")] : [];
const isRun = fs?.existsSync(program) && url.pathToFileURL(fs.realpathSync(program)).href === import.meta.url;
if (isRun) try {
  const data = fs.readFileSync(process.argv[2] ?? refuse("usage", "node verify.mjs FILE"));
  const found = await verify(parse(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data)));
  console.log(`${found.isErased ? "proven, without a body" : "proven"}; block hash ${found.blockHash}`);
} catch (error) { console.error(`not proven: ${error.message.replace(/[^ -~]/g, "?")}`); process.exitCode = 1; }
