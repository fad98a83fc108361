// One client of the unmodified npm package: commands come in as JSON, and all reports go out as JSON.
// Node (node.mjs) and a browser (page.mjs) share this module.

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
    // Syncs while the package loads the drafts to send, so that the batch follows the `sync`.
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
