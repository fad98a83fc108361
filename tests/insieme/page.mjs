// A client in a web page: a WebSocket to the test that served the page carries commands and reports.
import * as insieme from "insieme/browser";
import { drive } from "/driver.mjs";

const control = new WebSocket(`ws://${location.host}/control`);

const run = drive({
  insieme,
  makeStore: (clientId) => insieme.createIndexedDbClientStore({ dbName: clientId }),
  say: (told) => control.send(JSON.stringify(told)),
});

control.onmessage = ({ data }) => {
  const command = JSON.parse(data);
  if (command.do === "reload") location.reload();
  else run(command);
};
