// Elements and numbers. Text reaches the page by textContent alone, so what a model wrote is never markup.

/** Make an element. props: class, title, data-*, on* handlers, and properties; children: elements or text. */
function el(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("data-") || name.startsWith("aria-")) node.setAttribute(name, value);
    else if (name === "style") Object.assign(node.style, value);
    else node[name] = value;
  }
  add(node, children);
  return node;
}

function add(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

function fill(node, ...children) {
  node.replaceChildren();
  add(node, children);
  return node;
}

const isNumber = (x) => typeof x === "number" && Number.isFinite(x);

/** A number for reading: five digits, thousands set apart, powers of ten where it is very small or large. */
function format(x) {
  if (x === null || x === undefined) return "–";
  if (!Number.isFinite(x)) return String(x);
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size < 1e-4 || size >= 1e12) return x.toExponential(3);
  if (Number.isInteger(x) || size >= 1e4) return Math.round(x).toLocaleString("en-US");
  return String(Number(x.toPrecision(5)));
}

/** A number with all of its digits in an attribute, where a test or a reader finds it. */
function number(x, props) {
  return el("span", { class: "number", "data-value": isNumber(x) ? String(x) : "", title: isNumber(x) ? String(x) : undefined, ...props }, format(x));
}

const percent = (x) => (isNumber(x) ? `${Number((100 * x).toPrecision(3))} %` : "–");

function select(options, value, onchange, label) {
  const node = el("select", { "aria-label": label, onchange: () => onchange(node.value) });
  for (const [key, text] of options) node.append(el("option", { value: key, textContent: text }));
  node.value = value;
  return node;
}

/** A table; a cell may be text, a number or an element. */
function table(headings, rows, props) {
  const isRight = (x, i) => i && (!(x instanceof Node) || x.classList.contains("number"));
  const cell = (x, i) => el("td", { class: isRight(x, i) ? "right" : undefined }, typeof x === "number" ? number(x) : x);
  return el(
    "table",
    props,
    headings && el("thead", null, el("tr", null, headings.map((h) => el("th", null, h)))),
    el("tbody", null, rows.map((row) => el("tr", null, row.map(cell)))),
  );
}

const PALETTE = ["#3f7fc1", "#e8832a", "#4a9f4f", "#d64f54", "#9a6fb8", "#3aa6a0", "#a5785c", "#c9a227", "#d77fae", "#7d8794"];
const color = (i) => PALETTE[i % PALETTE.length];
const QUIET = "#9aa3ad55";

/** Color of the theme, by the name of its variable. */
const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
