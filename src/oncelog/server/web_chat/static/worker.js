// Service worker: caches the page's files for times when the server is unreachable. It always asks the server first.
const CACHE = "oncelog-chat";

// Fetch a file, or answer from the cache if the server is unreachable. All names and chats share one page file.
const answer = async (request) => {
  const cache = await caches.open(CACHE);
  const key = new URL(request.url).pathname;
  try {
    const response = await fetch(request);
    if (response.ok) await cache.put(key, response.clone());
    return response;
  } catch (error) {
    const kept = await cache.match(key);
    if (kept) return kept;
    throw error;
  }
};

const fill = async () => {
  const cache = await caches.open(CACHE);
  const listed = await (await fetch("/chat/files.json")).json();
  await cache.addAll(["/chat", ...listed]);
};

addEventListener("install", (event) => event.waitUntil(fill().then(() => skipWaiting())));
addEventListener("activate", (event) => event.waitUntil(clients.claim()));
addEventListener("fetch", (event) => {
  const { pathname, origin } = new URL(event.request.url);
  const isOurs = origin === location.origin && (pathname === "/chat" || pathname.startsWith("/chat/"));
  if (isOurs && event.request.method === "GET") event.respondWith(answer(event.request));
});
