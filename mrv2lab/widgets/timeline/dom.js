// -- dom: elements and texts ------------------------------------------------------------------------------------------

const { abs, ceil, floor, max, min, round } = Math;

/** An element. Data reaches the page through here only: attributes and text nodes, never markup.
 * @param {string} tag @param {object | string} [attrs] a string is a class @param {...(Node | string)} children */
function h(tag, attrs = {}, ...children) {
  const node = document.createElement(tag);
  if (typeof attrs === "string") attrs = { class: attrs };
  for (const key in attrs) {
    const value = attrs[key];
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/** A button with a name; `sign` is what it shows. */
const button = (sign, name, onclick, attrs = {}) => h("button", { type: "button", title: name, "aria-label": name, onclick, ...attrs }, sign);

// Control, zero-width and bidirectional-override characters: none of them may hide or reorder what is shown.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** @param {string} text @returns {string} with what would be invisible shown by its number */
const visible = (text) => String(text).replace(HIDDEN, (c) => "⟨U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "⟩");

const clamp = (value, low, high) => max(low, min(value, high));

/** "1 event", "2 events" */
const plural = (n, noun) => group(n) + " " + noun + (n === 1 ? "" : "s");

/** Digits in threes. */
const group = (n) => String(round(n)).replace(/\B(?=(\d{3})+$)/g, ",");

/** A name in `room` characters, empty if there is no sense in it; of "step#5" and "step 5" the number survives. */
function shortened(name, room) {
  if (name.length <= room) return name;
  const number = name.match(/[# ](\d+)$/)?.[1];
  if (!number) return room < 4 ? "" : name.slice(0, room - 1) + "…";
  if (room > number.length + 6) return name.slice(0, room - number.length - 2) + "…#" + number;
  return ["#" + number, number].find((text) => text.length <= room) || "";
}

const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];

/** A length of time: three digits and a unit. @param {number} ns */
function timeText(ns) {
  const [unit, word] = UNITS.find(([one]) => abs(ns) >= one) || UNITS[3];
  const value = ns / unit;
  return (abs(value) >= 999.5 ? group(value) : String(Number(value.toPrecision(3)))) + " " + word;
}

const signedText = (ns) => (ns > 0 ? "+" : ns < 0 ? "−" : "") + timeText(abs(ns));
