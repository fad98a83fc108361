// One client of the npm package, unmodified: commands come in as JSON, and all that it tells goes out as JSON.
// It is the same in Node (node.mjs) and in a browser (page.mjs).

const RECONNECT = { enabled: true, initialDelayMs: 20, maxDelayMs: 200 };

export const drive = ({ insieme, makeStore, WebSocketImpl, say }) => {
  let client;
  let store;
  let transport;
  let socket;

  const commands = {
    open: ({ url, clientId, projectId, isOffline }) => {
      const logger = ({ event, code }) => {
        if (event === "socket_closed") say({ type: "socket_closed", payload: { code } });
      };
      store = makeStore(clientId);
      socket = insieme.createBrowserWebSocketTransport({ url, WebSocketImpl, logger });
      transport = isOffline ? insieme.createOfflineTransport() : socket;
      client = insieme.createSyncClient({
        transport,
        store,
        token: "",
        clientId,
        projectId,
        reconnect: RECONNECT,
        onEvent: say,
      });
    },
    start: () => client.start(),
    stop: () => client.stop(),
    goOnline: () => transport.setOnlineTransport(socket),
    submit: ({ events }) => client.submitEvents(events),
    // Syncs while the package loads the drafts that it is about to send: the batch is sent behind the `sync`.
    submitDuringSync: ({ events, since }) => {
      const load = store.loadDraftsOrdered;
      store.loadDraftsOrdered = async () => {
        store.loadDraftsOrdered = load;
        await client.syncNow({ sinceCommittedId: since });
        return store.loadDraftsOrdered();
      };
      return client.submitEvents(events);
    },
    committed: () => store.listCommitted(),
    drafts: () => store.loadDraftsOrdered(),
  };

  const run = async (command) => {
    try {
      const result = await commands[command.do](command);
      say({ type: "done", payload: { number: command.number, result: result ?? null } });
    } catch (error) {
      say({ type: "done", payload: { number: command.number, error: String(error) } });
    }
  };

  let last = Promise.resolve();
  return (command) => {
    last = last.then(() => run(command));
    return last;
  };
};
