// Shows the answer of each kind of head: labels that exclude each other, labels that hold, and values.

import { element, head, number, part, percent, row } from "./elements.js";

/** The answer of each head by its name; the one label of a model has no name, and lies in the answer. */
const answersOf = ({ heads, label, scores }) => heads ?? { "": { label, scores } };

/** The settings of a value: its unit and its range. */
const settingsOf = (heads, name, value) => heads[name]?.values?.find((one) => one.name === value) ?? {};

/** The task of a head, as a sentence. */
export function purposeOf({ task, labels, values }) {
  if (values) return `The model estimates ${values.map(({ name }) => name).join(", ")}.`;
  if (task === "multi_label_classification") return `The model has ${labels.length} independent labels.`;
  return `The model has ${labels.length} classes.`;
}

/** The decisions of all heads, and a remark on them. */
export function headlineOf(answer, heads) {
  const parts = Object.entries(answersOf(answer)).map(([name, { label, labels, scores, values }]) => {
    if (label !== undefined) return [label, `with a score of ${percent(scores[label])}`];
    if (labels) {
      const count = `${labels.length} of ${Object.keys(scores).length} labels hold`;
      return [labels.join(", ") || "No label", count];
    }
    const texts = Object.entries(values).map(([value, x]) => `${value} ${withUnit(heads, name, value, x)}`);
    return [texts.join(", "), ""];
  });
  const joined = (index) => parts.map((texts) => texts[index]).filter(Boolean).join("; ");
  return [joined(0), joined(1)];
}

/** A row for each number: probabilities from the largest, values in their order. */
export function rowsOf(answer, heads) {
  return Object.entries(answersOf(answer)).flatMap(([name, { labels, scores, values }]) => {
    if (!scores) return Object.entries(values).map(([value, x]) => valueRow(heads, name, value, x));
    const largest = Object.entries(scores).sort(([, one], [, other]) => other - one);
    return largest.map(([label, score]) => numberRow(label, labels?.includes(label), score, percent(score)));
  });
}

function valueRow(heads, name, value, x) {
  const { minimum, maximum } = settingsOf(heads, name, value);
  const hasRange = minimum != null && maximum != null;
  const share = hasRange ? Math.min(1, Math.max(0, (x - minimum) / (maximum - minimum))) : null;
  return numberRow(value, false, share, withUnit(heads, name, value, x));
}

function numberRow(name, holds, share, text) {
  const bar = element("div", {}, ...(share === null ? [] : [part(share)]));
  const title = head(holds ? element("mark", {}, name) : name);
  return row(title, element("td", { className: "bar" }, bar), number(text));
}

function withUnit(heads, name, value, x) {
  const { unit } = settingsOf(heads, name, value);
  return `${Number(x.toPrecision(6))}${unit ? ` ${unit}` : ""}`;
}
