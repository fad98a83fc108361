// Functions for DOM elements. All of the page's code inserts strings as text and never parses them as HTML.

export const byId = (id) => document.getElementById(id);

// Create an element with properties, attributes (names with a hyphen, and `role`), data and children. Strings become text.
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

// Create a message's mark. It is hidden from screen readers, because adjacent text has the same meaning.
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

// Set an element's text only if it differs, so that screen readers do not repeat it and the element keeps the focus.
export const setText = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

// Return a function that renders a list's entries. It creates one element for each key, then moves and updates it.
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

// Return the colour of a name, one of eight that the style sheet defines for light and dark.
export const hueOf = (name) => [...name].reduce((sum, character) => (sum * 31 + character.codePointAt(0)) % 997, 7) % 8;
