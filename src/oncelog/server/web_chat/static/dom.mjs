// Elements. Text is only ever put in as text: nothing here, or anywhere in this page, reads a string as HTML.

export const byId = (id) => document.getElementById(id);

// An element with properties, attributes (with a hyphen, or `role`), data and children; a string is text.
export const el = (tag, { data = {}, ...given } = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  Object.assign(element.dataset, data);
  element.append(...children);
  return element;
};

const SVG = "http://www.w3.org/2000/svg";
const PATHS = {
  pending: ["M8 4.2V8l2.4 1.6", "M8 14.2A6.2 6.2 0 1 0 8 1.8a6.2 6.2 0 0 0 0 12.4z"],
  sent: ["m3.5 8.6 3 3 6-6.6"],
  reached: ["m1.5 8.6 3 3 6-6.6", "m8 11.2.6.4 6-6.6"],
  delivered: ["m1.5 8.6 3 3 6-6.6", "m8 11.2.6.4 6-6.6"],
  failed: ["M8 4.4v4.4", "M8 11.4v.2", "M8 14.2A6.2 6.2 0 1 0 8 1.8a6.2 6.2 0 0 0 0 12.4z"],
};

// A mark beside a message. It has no name: what it says stands beside it for those who do not see it.
export const icon = (name) => {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  for (const d of PATHS[name]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", d);
    svg.append(path);
  }
  return svg;
};

// Sets what differs, so that what is the same is not read out again, and keeps its focus.
export const setText = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

// The children of a list, one for each entry, made once and moved where they belong; `keyOf` and what makes and updates them.
export const keyed = (list, keyOf, make, update) => {
  const known = new Map();
  return (entries) => {
    const keys = new Set(entries.map(keyOf));
    for (const [key, element] of known) {
      if (keys.has(key)) continue;
      element.remove();
      known.delete(key);
    }
    let place = list.firstElementChild;
    entries.forEach((entry, index) => {
      const key = keyOf(entry);
      let element = known.get(key);
      if (!element) {
        element = make(entry);
        known.set(key, element);
      }
      update(element, entry, index, entries);
      if (element === place) place = place.nextElementSibling;
      else list.insertBefore(element, place);
    });
  };
};

// A colour of its own for each name: one of eight, which the style sheet has for light and dark.
export const hueOf = (name) => [...name].reduce((sum, character) => (sum * 31 + character.codePointAt(0)) % 997, 7) % 8;
