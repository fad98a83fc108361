// The view of one operation: its description, a form for its parameters and body, its answers, and buttons to try it.
import { el } from "./dom.mjs";
import { formatText } from "./format.mjs";
import { buildRequest, toCurl } from "./request.mjs";
import { limitsOf, schemaView, typeOf } from "./schema.mjs";
import { send } from "./send.mjs";

const isRepeated = (parameter) => parameter.schema.type === "array";

// Return an input for a parameter, filled with its example.
const parameterField = (operation, parameter) => {
  const id = `${operation.operationId}-${parameter.name}`;
  const value = parameter.example === undefined ? "" : [parameter.example].flat().join("\n");
  const given = { id, value, spellcheck: false, autocomplete: "off", data: { parameter: parameter.name }, "aria-describedby": `${id}-note` };
  const schema = isRepeated(parameter) ? parameter.schema.items : parameter.schema;
  const input = isRepeated(parameter) ? el("textarea", { ...given, rows: 2 }) : el("input", given);
  if (schema.default !== undefined) input.placeholder = JSON.stringify(schema.default);
  const facts = [parameter.in, isRepeated(parameter) ? `${typeOf(schema)}, one per line` : typeOf(schema), limitsOf(schema)];
  return el("div", { className: "field" },
    el("label", { htmlFor: id }, el("code", {}, parameter.name), parameter.required ? " (required)" : ""),
    input,
    el("small", { id: `${id}-note` }, `${facts.filter(Boolean).join(", ")}. `, ...formatText(parameter.description ?? "")));
};

const bodyField = (operation, description) => {
  const [content] = Object.values(operation.requestBody.content);
  const id = `${operation.operationId}-body`;
  const value = JSON.stringify(content.example, null, 2);
  return [
    el("h4", {}, "Body"),
    el("div", { className: "field" },
      el("label", { htmlFor: id }, operation.requestBody.required ? "JSON (required)" : "JSON"),
      el("textarea", { id, value, spellcheck: false, rows: Math.min(14, value.split("\n").length + 1), data: { body: "yes" } })),
    el("p", {}, operation.requestBody.description ?? ""),
    schemaView(content.schema, description),
  ];
};

const isSuccess = (status) => Number(status) < 400;

const answerView = (status, response, description) => {
  const kinds = Object.entries(response.content ?? {});
  return el("li", {}, el("code", { className: "status", data: { good: isSuccess(status) ? "yes" : "no" } }, status), " ",
    ...formatText(response.description),
    ...(isSuccess(status) ? kinds.flatMap(([kind, { schema }]) => [el("small", {}, ` ${kind}`), schemaView(schema, description)]) : []));
};

const answersView = (operation, description) => {
  const entries = Object.entries(operation.responses);
  const list = (wanted) => el("ul", { className: "answers" }, ...entries.filter(([status]) => isSuccess(status) === wanted)
    .map(([status, response]) => answerView(status, response, description)));
  return [
    el("h4", {}, "Answers"), list(true),
    el("details", { className: "schema" }, el("summary", {}, "Errors"), list(false), el("p", {}, el("a", { href: "#errors" }, "All error codes"))),
  ];
};

// Return the values of a form's parameters, as lists of strings. An empty field is left out.
const readValues = (form, operation) => Object.fromEntries((operation.parameters ?? []).flatMap((parameter) => {
  const field = form.querySelector(`[data-parameter="${CSS.escape(parameter.name)}"]`);
  if (!field?.value) return [];
  return [[parameter.name, isRepeated(parameter) ? field.value.split("\n").filter(Boolean) : [field.value]]];
}));

const tryView = (form, operation, token) => {
  const isStream = Object.values(operation.responses).some((response) => response.content?.["text/event-stream"]);
  const needsSocket = "101" in operation.responses;
  const output = el("div", { className: "output" });
  const build = () => buildRequest(operation, readValues(form, operation), form.querySelector("[data-body]")?.value, token());
  const sendButton = el("button", { type: "button", className: "primary", data: { action: "send" }, disabled: needsSocket }, "Send");
  const stopButton = el("button", { type: "button", data: { action: "stop" }, hidden: true }, "Stop");
  const copyButton = el("button", { type: "button", data: { action: "curl" } }, "Copy as curl");
  sendButton.addEventListener("click", () => send(build(), output, stopButton));
  copyButton.addEventListener("click", () => copy(toCurl(build(), new URL(".", location.href).href.replace(/\/$/, ""), isStream), output));
  return [
    el("div", { className: "row actions" }, sendButton, stopButton, copyButton),
    ...(needsSocket ? [el("p", {}, "This page cannot send it, because the operation needs a WebSocket.")] : []),
    output,
  ];
};

// Show a command, and copy it if the browser allows that. Browsers refuse it on pages without TLS.
const copy = async (command, output) => {
  const state = el("p", { role: "status" }, "Select the command to copy it.");
  output.replaceChildren(el("pre", { tabIndex: 0, className: "command", "aria-label": "Command" }, command), state);
  try {
    await navigator.clipboard.writeText(command);
    state.textContent = "Copied. Set the variable TOKEN to your credential if the command contains it.";
  } catch {
    getSelection().selectAllChildren(output.querySelector("pre"));
  }
};

const fill = (view, operation, description, token) => {
  const form = el("div", { className: "form" });
  const current = (operation.parameters ?? []).filter((parameter) => !parameter.deprecated);
  const previous = (operation.parameters ?? []).filter((parameter) => parameter.deprecated);
  if (operation.description) form.append(el("p", {}, ...formatText(operation.description)));
  form.append(el("p", {}, operation.security?.length ? "Needs a credential, except in development mode." : "Needs no credential."));
  if (current.length) form.append(el("h4", {}, "Parameters"), ...current.map((parameter) => parameterField(operation, parameter)));
  if (previous.length) form.append(el("p", {}, "Deprecated: ", ...previous.flatMap((one) => [el("code", {}, one.name), " "])));
  if (operation.requestBody) form.append(...bodyField(operation, description));
  form.append(...tryView(form, operation, token), ...answersView(operation, description));
  view.append(form);
};

// Return the view of an operation. `token` returns the credential that the user has typed.
export const operationView = (operation, description, token) => {
  const view = el("details", { className: "operation", id: `operation-${operation.operationId}` },
    el("summary", {},
      el("b", { className: "method", data: { method: operation.method } }, operation.method), " ",
      el("code", {}, operation.path), " ",
      el("span", {}, operation.summary)));
  view.addEventListener("toggle", () => {
    if (view.open && view.childElementCount === 1) fill(view, operation, description, token);
  });
  return view;
};
