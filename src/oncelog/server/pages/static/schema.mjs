// Renders JSON Schemas. A named schema is expanded when the reader opens it, so recursive schemas end.
import { el } from "./dom.mjs";
import { formatText } from "./format.mjs";

const nameOf = (reference) => reference.split("/").at(-1);

const resolve = (reference, description) =>
  reference.slice(2).split("/").reduce((found, step) => found[step], description);

// Return a short text for the type of a schema.
export const typeOf = (schema) => {
  if (schema.$ref) return nameOf(schema.$ref);
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const choices = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (choices) return choices.map(typeOf).join(schema.allOf ? " & " : " | ");
  if (schema.type === "array") return `array of ${schema.items ? typeOf(schema.items) : "anything"}`;
  return [schema.type ?? (schema.properties ? "object" : "any")].flat().join(" | ");
};

const LIMITS = {
  minimum: "at least", maximum: "at most", minLength: "characters at least", maxLength: "characters at most",
  minItems: "items at least", maxItems: "items at most", pattern: "pattern", format: "format", default: "default",
};

// Return the limits of a schema as a text.
export const limitsOf = (schema) =>
  Object.entries(LIMITS).filter(([name]) => name in schema).map(([name, label]) => `${label} ${JSON.stringify(schema[name])}`).join(", ");

const memberView = (name, schema, isRequired, description) =>
  el("li", {},
    el("code", { className: "name" }, name), " ",
    el("span", { className: "type" }, typeOf(schema)),
    ...(isRequired ? [] : [el("span", { className: "optional" }, " optional")]),
    ...(schema.deprecated ? [el("span", { className: "optional" }, " deprecated")] : []),
    ...(limitsOf(schema) ? [el("small", {}, ` ${limitsOf(schema)}`)] : []),
    ...(schema.description ? [el("p", {}, ...formatText(schema.description))] : []),
    ...nested(schema, description));

// Return the views of the schemas within a schema.
const nested = (schema, description) => {
  if (schema.$ref) return [referenceView(schema.$ref, description)];
  const parts = [...(schema.anyOf ?? []), ...(schema.oneOf ?? []), ...(schema.allOf ?? []), ...(schema.items ? [schema.items] : [])];
  const views = parts.flatMap((part) => nested(part, description));
  if (schema.properties) views.push(membersView(schema, description));
  if (typeof schema.additionalProperties === "object") views.push(...nested(schema.additionalProperties, description));
  return views;
};

const membersView = (schema, description) =>
  el("ul", { className: "members" }, ...Object.entries(schema.properties).map(([name, member]) =>
    memberView(name, member, schema.required?.includes(name), description)));

const referenceView = (reference, description) => {
  const view = el("details", { className: "schema" }, el("summary", {}, nameOf(reference)));
  view.addEventListener("toggle", () => {
    if (view.open && view.childElementCount === 1) view.append(...schemaParts(resolve(reference, description), description));
  });
  return view;
};

const schemaParts = (schema, description) => [
  ...(schema.description ? [el("p", {}, ...formatText(schema.description))] : []),
  ...(schema.properties ? [] : [el("p", {}, el("span", { className: "type" }, typeOf(schema)), ` ${limitsOf(schema)}`)]),
  ...nested(schema, description),
];

// Return an element that shows a schema.
export const schemaView = (schema, description) =>
  schema.$ref ? referenceView(schema.$ref, description) : el("div", {}, ...schemaParts(schema, description));
