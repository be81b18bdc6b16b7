/* Elements, numbers and times. Text is always set as text: nothing here can become markup. */
"use strict";
const W5 = {};

W5.h = function (tag, attributes, ...children) {
  const svg = W5.SVG.has(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  W5.put(element, ...children);
  return element;
};
W5.SVG = new Set(["svg", "g", "line", "circle", "path", "text", "title"]);

/* Append children: elements, and everything else as text. */
W5.put = function (element, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
};
W5.fill = function (element, ...children) {
  element.replaceChildren();
  return W5.put(element, ...children);
};
/* Set a text only if it changed, so that a selection of it stays. */
W5.say = function (element, text) {
  if (element.textContent !== text) element.textContent = text;
};

/* Numbers as people read them; a missing one is a dash. */
W5.number = function (value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size === 0 || size >= 100) return value.toFixed(0);
  if (size < 1e-4) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
};
W5.whole = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));
W5.percent = (value) => (isFinite(value) ? `${Math.round(100 * value)} %` : "–");
W5.mega = function (bytes) {
  if (!bytes) return "–";
  const value = bytes / 1e6;
  return value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toPrecision(1);
};
W5.bytes = function (value) {
  const units = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
  for (const [size, unit] of units) if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  return `${value} B`;
};
W5.duration = function (seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const all = Math.round(seconds), pad = (value) => String(value).padStart(2, "0");
  const hours = Math.floor(all / 3600), minutes = Math.floor(all / 60) % 60;
  return hours ? `${hours}:${pad(minutes)}:${pad(all % 60)}` : `${minutes}:${pad(all % 60)}`;
};
W5.clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

/* A colour, size or font of the style sheet. */
W5.style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/* A section with a heading, and a place for its sentence. */
W5.panel = function (id, title, ...children) {
  const heading = W5.h("h2", { id: `${id}-title` }, title);
  return W5.h("section", { id, class: "panel", "aria-labelledby": `${id}-title`, tabindex: "-1" }, heading, children);
};

/* A table: names of columns, then rows of texts. Columns of numbers are aligned to the right. */
W5.table = function (caption, names, rows, numeric) {
  const cell = (tag, text, at) => W5.h(tag, { class: numeric && numeric[at] ? "n" : null, scope: tag === "th" ? "col" : null }, text);
  return W5.h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    W5.h("table", {},
      W5.h("caption", { class: "hidden" }, caption),
      W5.h("thead", {}, W5.h("tr", {}, names.map((name, at) => cell("th", name, at)))),
      W5.h("tbody", {}, rows.map((row) => W5.h("tr", {}, row.map((text, at) => cell("td", text, at)))))));
};

/* One of several buttons is pressed. */
W5.choice = function (label, options, chosen, changed) {
  const buttons = options.map(([value, text]) => W5.h("button", {
    type: "button", "aria-pressed": String(value === chosen),
    onclick: () => {
      for (const [at, button] of buttons.entries()) button.setAttribute("aria-pressed", String(options[at][0] === value));
      changed(value);
    },
  }, text));
  return W5.h("span", { class: "choice", role: "group", "aria-label": label }, buttons);
};
W5.toggle = function (text, label, changed) {
  const button = W5.h("button", {
    type: "button", "aria-pressed": "false", "aria-label": label,
    onclick: () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      changed(on);
    },
  }, text);
  return button;
};
