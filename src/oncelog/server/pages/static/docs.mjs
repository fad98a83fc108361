// The API page: renders the OpenAPI document of this server, and sends requests.
import { byId, el } from "./dom.mjs";
import { formatText } from "./format.mjs";
import { operationView } from "./operation.mjs";
import { schemaView } from "./schema.mjs";
import { startTheme } from "./theme.mjs";

// The views of the operations: name, text to search in, element, and link in the list of contents.
const views = [];

// Return the operations of an API in the order of the document, in which their examples succeed.
const operationsOf = (description, api) =>
  Object.entries(description.paths).flatMap(([path, methods]) =>
    Object.entries(methods).filter(([, operation]) => operation.tags?.includes(api)).map(([method, operation]) => ({
      ...operation, path, method: method.toUpperCase(),
    })),
  );

const render = (description) => {
  const token = () => byId("token").value.trim();
  const main = byId("operations");
  const contents = byId("contents-list");
  byId("version").textContent = description.info.version;
  main.replaceChildren(...description.info.description.split("\n\n").map((part) => el("p", {}, ...formatText(part))));
  for (const { name, description: purpose } of description.tags) {
    const operations = operationsOf(description, name);
    if (!operations.length) continue;
    const section = el("section", { id: `api-${name}`, "aria-labelledby": `name-${name}` },
      el("h2", { id: `name-${name}` }, name), el("p", {}, ...formatText(purpose)));
    const list = el("ul");
    for (const operation of operations) {
      const element = operationView(operation, description, token);
      const link = el("li", {}, el("a", { href: `#${element.id}` }, el("b", { className: "method", data: { method: operation.method } }, operation.method), ` ${operation.summary}`));
      const words = [operation.operationId, operation.method, operation.path, operation.summary, operation.description ?? "", name];
      views.push({ element, link, section, words: words.join(" ").toLowerCase() });
      section.append(element);
      list.append(link);
    }
    contents.append(el("h3", {}, el("a", { href: `#api-${name}` }, name)), list);
    main.append(section);
  }
  main.append(errorsView(description));
  contents.append(el("h3", {}, el("a", { href: "#errors" }, "errors")));
};

// The problem document and the table of all error codes.
const errorsView = (description) => {
  const problem = description.components.schemas.Problem;
  const rows = (problem.properties.code["x-codes"] ?? []).map(({ code, status, title }) =>
    el("tr", {}, el("th", { scope: "row" }, el("code", {}, code)), el("td", {}, String(status)), el("td", {}, title)));
  const head = ["Code", "Status", "Meaning"].map((name) => el("th", { scope: "col" }, name));
  return el("section", { id: "errors", "aria-labelledby": "name-errors" },
    el("h2", { id: "name-errors" }, "errors"),
    el("p", {}, "Every error is a problem document (RFC 9457)."),
    el("div", { className: "wide" }, el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows))),
    schemaView({ $ref: "#/components/schemas/Problem" }, description));
};

const filter = () => {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const view of views) {
    const isFound = words.every((word) => view.words.includes(word));
    view.element.hidden = view.link.hidden = !isFound;
    count += isFound ? 1 : 0;
  }
  for (const section of new Set(views.map((view) => view.section))) {
    section.hidden = views.every((view) => view.section !== section || view.element.hidden);
  }
  byId("found").textContent = words.length ? `${count} of ${views.length} operations` : `${views.length} operations`;
};

// Open the operation that the address names, and move the focus to it.
const openTarget = () => {
  const target = location.hash && byId(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  if (target.hidden || target.closest("[hidden]")) {
    byId("filter").value = "";
    filter();
  }
  if (target instanceof HTMLDetailsElement) {
    target.open = true;
    target.querySelector("summary").focus();
  }
  target.scrollIntoView();
};

const start = async () => {
  startTheme();
  byId("contents").open = matchMedia("(min-width: 860px)").matches;
  const response = await fetch("openapi.json", { credentials: "omit" });
  if (!response.ok) throw new Error(`GET openapi.json: ${response.status} ${response.statusText}`);
  render(await response.json());
  byId("filter").addEventListener("input", filter);
  addEventListener("hashchange", openTarget);
  filter();
  openTarget();
  document.body.dataset.ready = "yes";
};

start().catch((error) => {
  byId("operations").replaceChildren(el("p", { role: "alert" }, `The API's description cannot be loaded. ${error.message}`));
});
