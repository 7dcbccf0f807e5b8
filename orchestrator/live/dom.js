// Small helpers. Text from the service only ever becomes text nodes.

export const at = (id) => document.getElementById(id);

export function h(tag, fields = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function put(node, text) {
  const wanted = String(text ?? "");
  if (node.textContent !== wanted) node.textContent = wanted;
}

// JSON has no NaN: the service writes such floats as text.
export const number = (value) => (value === null || value === undefined ? null : Number(value));

export function short(value, digits = 3) {
  const found = number(value);
  if (found === null) return "–";
  if (!Number.isFinite(found)) return String(value);
  const size = Math.abs(found);
  if (size >= 1e9) return `${(found / 1e9).toFixed(1)} G`;
  if (size >= 1e6) return `${(found / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(found / 1e3).toFixed(1)} k`;
  if (size >= 100) return found.toFixed(0);
  return Number.isInteger(found) ? String(found) : found.toPrecision(digits);
}

export const percent = (value) => (value === null || !Number.isFinite(value) ? "–" : `${(100 * value).toFixed(0)} %`);

export function bar(share, kind = "") {
  const fill = h("i");
  fill.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return h("span", { class: `bar ${kind}` }, fill);
}

export const GOOD = new Set(["RUNNING", "SUCCEEDED", "closed", "committed"]);
export const BAD = new Set(["FAILED", "open", "forced_open", "rolled_back", "failed"]);

export function pill(node, state) {
  put(node, state);
  node.className = `pill ${GOOD.has(state) ? "good" : BAD.has(state) ? "bad" : "warn"}`;
  return node;
}

export function toast(text) {
  const node = at("toast");
  put(node, text);
  node.hidden = false;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => { node.hidden = true; }, 8000);
}
