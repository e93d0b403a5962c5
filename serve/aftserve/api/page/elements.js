// Elements of the page, and the format of its numbers. Text enters the page as text only: the
// Content-Security-Policy forbids HTML from strings.

export const byId = (id) => document.getElementById(id);

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export const cell = (content) => element("td", {}, content);
export const number = (content) => element("td", { className: "number" }, content);
export const head = (...content) => element("th", { scope: "row" }, ...content);
export const row = (...cells) => element("tr", {}, ...cells);
export const fill = (id, children) => byId(id).replaceChildren(...children);
export const fillTable = (id, rows) => byId(id).tBodies[0].replaceChildren(...rows);
export const fillFacts = (id, facts) =>
  fill(id, facts.map(([name, value, stage]) => {
    const term = element("dt", {}, name);
    if (stage) term.dataset.stage = stage;
    return element("div", {}, term, element("dd", {}, value));
  }));

/** Return a part of a bar, as wide as its share of the bar. */
export function part(share, stage) {
  const made = element("div");
  made.style.width = `${100 * share}%`;
  if (stage) made.dataset.stage = stage;
  return made;
}

export const NUMBER = new Intl.NumberFormat("en");
export const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toPrecision(3)}`;
export const tokens = (count) => `${NUMBER.format(count)} ${count === 1 ? "token" : "tokens"}`;
export const scientific = (value) => (typeof value === "number" ? value.toExponential(1) : value ?? "");

export function percent(share) {
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  if (share < 1 && share >= 0.9995) return "> 99.9 %";
  return `${(100 * share).toFixed(1)} %`;
}

export function duration(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
}

/** Return whether a passage has characters in the shown text, which is the first of a pair. */
export const isShown = ({ text, text_pair: isSecond }) => Boolean(text) && !isSecond;

/** Return a text with a mark, which `make` returns, for each span that has characters. */
export function marked(content, spans, make) {
  const nodes = [];
  let point = 0, index = 0; // the position in code points, as the server counts, and in UTF-16 units
  const upTo = (end) => {
    const start = index;
    for (; point < end; point++) index += content.codePointAt(index) > 0xffff ? 2 : 1;
    return content.slice(start, index);
  };
  for (const span of spans.filter(isShown).sort((one, other) => one.start - other.start)) {
    nodes.push(upTo(span.start));
    // Two spans may share a character of several bytes: it belongs to the first one.
    nodes.push(make(span, upTo(span.end)));
  }
  return [...nodes, content.slice(index)];
}
