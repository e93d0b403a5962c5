// The answers of a model's heads: labels with their scores, values with their units, spans, or vectors.

import { byId, element, fill, fillTable, head, number, part, percent, row } from "./elements.js";
import { showTokens, summaryOf } from "./tokens.js";

const MAX_LISTED = 20; // labels that a sentence lists
let heads = {}; // the heads of GET /info, by the names of their outputs
let explainable = []; // the names of the outputs whose labels and values can have evidence

/** Keep the heads of the model, and return a sentence on each. */
export function describeHeads(described, withEvidence) {
  heads = described;
  explainable = withEvidence;
  return Object.values(heads).map(purposeOf).join(" ");
}

function purposeOf({ task, labels, dimensions, per_token: perToken, values }) {
  if (dimensions) return `Returns a vector of ${dimensions} numbers for every ${perToken ? "token" : "document"}.`;
  if (task === "token_classification") return `Labels every token with one of ${listed(labels, "labels")}.`;
  if (values) return `Estimates ${values.map((value) => value.name).join(", ")}.`;
  if (task === "multi_label_classification") return `Finds which hold of ${listed(labels, "labels")}.`;
  return `Distinguishes ${listed(labels, "classes")}.`;
}

/** Return the number of some labels, and the first of their names. */
function listed(labels, kind) {
  const more = labels.length > MAX_LISTED ? ", …" : "";
  return `${labels.length} ${kind}: ${labels.slice(0, MAX_LISTED).join(", ")}${more}`;
}

/** Show the decision and the numbers of every head, and return the decision as text. */
export function showHeads(answer, content) {
  const answers = Object.entries(answersOf(answer));
  const decisions = answers.map(([name, given]) => decisionOf(name, given));
  const several = answers.length > 1;
  fill("label", decisions.flatMap(({ names, chips }, place) => [
    ...(several ? [element("span", { className: "head-name" }, answers[place][0]), " "] : []),
    ...(chips ? names.flatMap((one, index) => [chip(answers[place][0], chips[index], one), " "]) : [names.join(", "), " "]),
  ]));
  byId("remark").textContent = decisions.map(({ remark }) => remark).filter(Boolean).join("; ");
  showNumbers(answers.filter(([name]) => !isShownAlone(name)), several);
  showTokens(answers.filter(([name]) => isShownAlone(name)), heads, content, several);
  return decisions.map((one) => [one.names.join(", "), one.remark].filter(Boolean).join(", ")).join("; ");
}

/** Return whether a head answers with spans or vectors, which have their own place. */
const isShownAlone = (name) =>
  ["token_classification", "feature_extraction"].includes(heads[name]?.task) || heads[name]?.per_token;

/** Show the table of scores and values, with a title for each head if there are several. */
function showNumbers(answers, several) {
  byId("numbers").hidden = !answers.length;
  if (!answers.length) return;
  const [title, names, numbers] = headingsOf(answers.map(([, content]) => content));
  byId("scores-title").textContent = title;
  byId("scores-names").textContent = names;
  byId("scores-numbers").textContent = numbers;
  fillTable("scores", answers.flatMap(([name, content]) => [
    ...(several ? [row(element("th", { scope: "rowgroup", colSpan: 3, className: "head-name" }, name))] : []),
    ...rowsOf(name, content),
  ]));
}

/** Return the answer of each head by its name; a label without heads is that of the only one. */
function answersOf({ heads: given, label, scores, calibrated, abstain }) {
  return given ?? { [Object.keys(heads)[0] ?? ""]: { label, scores, calibrated, abstain } };
}

/** Return a name that can be clicked to show its evidence, or only a span with the name. */
function explained(head, name, className, text = name) {
  if (!explainable.includes(head)) return element("span", { className }, text);
  const made = element("button", { type: "button", className: `${className} explain`, title: `Show the evidence for ${name}` }, text);
  Object.assign(made.dataset, { head, name });
  return made;
}

const chip = (head, name, text) => explained(head, name, "chip", text);

/** Return the name in an answer: its label, or whatever a head of another kind calls it. */
const nameIn = (content) => Object.values(content).find((value) => typeof value === "string");

/** Return the names that a head answers with, and a remark on them. */
function decisionOf(name, content) {
  const { labels, scores, calibrated, abstain, values } = content;
  const label = nameIn(content);
  if (isShownAlone(name)) return { names: [summaryOf(content)] };
  if (values) {
    const outside = Object.entries(values).filter(([value, x]) => isOutside(settingsOf(name, value), x));
    return {
      names: Object.entries(values).map(([value, x]) => `${value} ${withUnit(x, settingsOf(name, value))}`),
      remark: outside.map(([value]) => `${value} is outside its range, ${rangeOf(settingsOf(name, value))}`).join("; "),
      chips: Object.keys(values).length > 1 && Object.keys(values),
    };
  }
  const doubt = abstain ? ", too uncertain for the error budget" : "";
  if (!labels) {
    const kind = calibrated ? "probability" : "score";
    return { names: [label], remark: `with a ${kind} of ${percent((calibrated ?? scores)[label])}${doubt}` };
  }
  const remark = `Labels that hold: ${labels.length} of ${Object.keys(scores).length}${doubt}`;
  return labels.length ? { names: labels, remark, chips: labels } : { names: ["No label"], remark };
}

/** Return the title of the table, and those of its columns. */
function headingsOf(contents) {
  if (contents.every(({ values }) => values)) return ["Values", "Value", "Estimate"];
  const [title, column] = contents.every(({ calibrated }) => calibrated)
    ? ["Calibrated probabilities", "Probability"] : ["Scores", "Score"];
  if (contents.every(nameIn)) return [title, "Class", column];
  if (contents.every(({ labels }) => labels)) return [title, "Label", column];
  return ["Scores and values", "Name", "Number"];
}

/** Return a row for each number of a head: scores from the largest, values in their order. */
function rowsOf(name, content) {
  const { labels, scores, calibrated, values } = content;
  const label = nameIn(content);
  if (scores) {
    return Object.entries(calibrated ?? scores).sort(([, one], [, other]) => other - one).map(([one, score]) => {
      const holds = labels?.includes(one);
      const title = head(explained(name, one, "name"), ...(holds ? [" ", element("span", { className: "chip" }, "holds")] : []));
      // A threshold is of the score before the calibration.
      const made = row(title, bar(score, calibrated ? undefined : thresholdOf(name, one)), number(percent(score)));
      made.className = holds || one === label ? "chosen" : "";
      return made;
    });
  }
  return Object.entries(values).map(([value, x]) => {
    const settings = settingsOf(name, value);
    const { minimum: low, maximum: high } = settings;
    const range = hasRange(settings) ? [element("div", { className: "hint" }, rangeOf(settings))] : [];
    const share = hasRange(settings) ? Math.min(1, Math.max(0, (x - low) / (high - low))) : null;
    return row(head(explained(name, value, "name"), ...range), bar(share), number(withUnit(x, settings)));
  });
}

/** Return a bar; it has no track without a share, and a line at the threshold if there is one. */
function bar(share, threshold) {
  const made = element("td", { className: "bar" });
  if (share === null) return made;
  const track = element("div", {}, part(share));
  if (threshold !== undefined) {
    const line = element("span", { className: "threshold", title: `Threshold: ${percent(threshold)}` });
    line.style.left = `${100 * threshold}%`;
    track.append(line);
  }
  made.append(track);
  return made;
}

function thresholdOf(name, label) {
  const { labels, thresholds, threshold } = heads[name] ?? {};
  if (thresholds) return thresholds[labels.indexOf(label)];
  return label === labels?.[1] ? threshold : undefined; // a binary head has one, for its second label
}

const settingsOf = (name, value) => heads[name]?.values?.find((one) => one.name === value) ?? {};
const hasRange = ({ minimum, maximum }) => minimum != null && maximum != null;
const isOutside = ({ minimum, maximum }, x) => (minimum != null && x < minimum) || (maximum != null && x > maximum);

function withUnit(x, { unit }) {
  return `${Number(x.toPrecision(6))}${unit ? ` ${unit}` : ""}`;
}

function rangeOf({ minimum, maximum, unit }) {
  if (maximum == null) return `at least ${withUnit(minimum, { unit })}`;
  if (minimum == null) return `at most ${withUnit(maximum, { unit })}`;
  return `${minimum} to ${withUnit(maximum, { unit })}`;
}
