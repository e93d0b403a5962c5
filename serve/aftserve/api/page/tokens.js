// The answers for the tokens of a document: highlighted spans with a legend, and vectors.

import { NUMBER, element, fill, marked, percent } from "./elements.js";

const MOST_SPANS = 2000; // more marks would make the page slow
const COLORS = 8; // the number of colors of marks in page.css
const SHOWN_NUMBERS = 8; // of a vector

/** Return an answer for tokens, or a vector, in a few words. */
export function summaryOf({ labels, spans, vector, vectors }) {
  if (vector) return `Vector of ${NUMBER.format(vector.length)} numbers`;
  if (vectors) return `${counted(vectors.length, "vector")} of ${NUMBER.format(vectors[0]?.length ?? 0)} numbers`;
  if (spans.length) return counted(spans.length, "span");
  return `${counted(new Set(labels).size, "label")} of ${counted(labels.length, "token")}`;
}

const counted = (count, noun) => `${NUMBER.format(count)} ${noun}${count === 1 ? "" : "s"}`;

/** Show the spans or vectors of each of these answers, with a title for each head if there are several. */
export function showTokens(answers, heads, content, several) {
  fill("tokens", answers.flatMap(([name, answer]) => {
    const title = answer.labels ? "Spans" : "Vectors";
    const shown = answer.labels ? spansOf(answer, heads[name], content) : vectorsOf(answer);
    return [element("h3", {}, several ? `${title} of ${name}` : title), ...shown];
  }));
}

/** Return a legend of the labels, and the document with a mark for each span. */
function spansOf({ labels, spans }, { labels: known, aggregation }, content) {
  const names = [...new Set(spans.map(({ label }) => label))].sort();
  if (!spans.length) {
    const none = aggregation === "none" ? "This head gives labels without spans." : "No span was found.";
    return [element("p", {}, none), legendOf(known.filter((name) => labels.includes(name)), labels)];
  }
  const shown = spans.slice(0, MOST_SPANS);
  const made = marked(content, shown, (span, text) => {
    const mark = element("mark", { className: "span", title: `${span.label}, score ${percent(span.score)}` }, text);
    mark.dataset.color = names.indexOf(span.label) % COLORS;
    mark.dataset.label = span.label;
    return mark;
  });
  const place = element("div", { className: "scroll document", tabIndex: 0, ariaLabel: "The document, its spans highlighted" });
  place.setAttribute("role", "region");
  place.append(...made);
  const rest = element("p", { className: "hint" }, `The first ${NUMBER.format(MOST_SPANS)} of ${counted(spans.length, "span")} are highlighted.`);
  return [
    legendOf(names, spans.map(({ label }) => label)),
    ...(spans.length > MOST_SPANS ? [rest] : []),
    place,
  ];
}

/** Return a list of names with their colors, and how often each is given. */
function legendOf(names, given) {
  return element("ul", { className: "legend" }, ...names.map((name, place) => {
    const color = element("span", { className: "swatch", ariaHidden: "true" });
    color.dataset.color = place % COLORS;
    return element("li", {}, color, `${name}: ${NUMBER.format(given.filter((one) => one === name).length)}`);
  }));
}

/** Return the first numbers of a vector, or of the vector of the first token. */
function vectorsOf({ vector, vectors }) {
  const first = vector ?? vectors[0] ?? [];
  const numbers = first.slice(0, SHOWN_NUMBERS).map((x) => Number(x.toPrecision(4)));
  const length = Math.hypot(...first).toPrecision(4);
  const of = vector ? "The vector" : "The vector of the first token";
  const more = first.length > SHOWN_NUMBERS ? ", …" : "";
  return [
    element("p", {}, `${of} has a length of ${length}. POST /infer returns all its numbers.`),
    element("p", {}, element("code", {}, `${numbers.join(", ")}${more}`)),
  ];
}
