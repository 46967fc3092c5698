const SVG = "http://www.w3.org/2000/svg";
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

const byId = (id) => document.getElementById(id);

/* What a policy wrote must not hide or reorder what a reader sees. */
const visible = (text) =>
  String(text).replace(HIDDEN, (found) => `⟨${found.codePointAt(0).toString(16).toUpperCase().padStart(2, "0")}⟩`);

/* The only way that data becomes part of the page: children are nodes, or strings that become text. */
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.setAttribute("class", value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(visible(child)))));
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const missing = (value) => value === null || value === undefined;
const percent = (value, digits = 1) => (missing(value) ? "–" : `${(100 * value).toFixed(digits)}%`);
const points = (value) => (missing(value) ? "–" : `${value < 0 ? "−" : value > 0 ? "+" : ""}${Math.abs(100 * value).toFixed(1)}`);
const count = (value) => (missing(value) ? "–" : Math.round(value).toLocaleString("en-US"));
const span = (found) => `${percent(found.low, 0)} – ${percent(found.high, 0)}`;

function short(value) {
  if (missing(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

function seconds(value) {
  if (missing(value)) return "–";
  return value < 100 ? `${value.toFixed(1)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

const tone = (word) =>
  ({ live: "good", solved: "good", kept: "good", passed: "good", refused: "bad", failed: "bad", error: "bad", stale: "warn", truncated: "warn", timed_out: "warn", format_error: "warn" })[word] || "";
const badge = (word) => el("span", { class: `badge ${tone(word)}` }, word.replaceAll("_", " "));

/* Text to take along: a click copies it. */
function copyable(text, shown = text) {
  const button = el("button", { type: "button", class: "copy mono", title: "copy" }, shown);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      getSelection().selectAllChildren(button);
      return;
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = visible(shown); }, 900);
  });
  return button;
}

function tip(event, text) {
  const box = byId("tip");
  box.textContent = text ? visible(text) : "";
  box.style.display = text ? "block" : "none";
  if (!text) return;
  const right = event.clientX + 14 + box.offsetWidth > innerWidth;
  box.style.left = `${Math.max(4, right ? event.clientX - 14 - box.offsetWidth : event.clientX + 14)}px`;
  box.style.top = `${Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 6)}px`;
}
