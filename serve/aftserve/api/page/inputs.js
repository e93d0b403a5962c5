// Fields for the extra inputs of a model, and their values for a request.

import { byId, element, NUMBER } from "./elements.js";

let described = []; // the extra inputs of the model
let takesPairs = false; // whether a document is two texts
const SECOND = "input-text_pair"; // the field of the second text
const TYPES = "token_type_ids"; // the input that the tokenizer makes of two texts
const idOf = ({ name }) => `input-${name}`;

/** Show a field for each extra input and a second text; fields of the same inputs keep their values. */
export function describeInputs(all, pairs) {
  const inputs = all.filter(({ name }) => !pairs || name !== TYPES);
  if (pairs === takesPairs && JSON.stringify(inputs) === JSON.stringify(described)) return;
  [described, takesPairs] = [inputs, pairs];
  byId("inputs").hidden = !pairs && !inputs.length;
  const second = element("div", {},
    element("label", { htmlFor: SECOND }, "Second text"),
    element("textarea", { id: SECOND, autocomplete: "off", spellcheck: false, required: true }));
  byId("inputs").replaceChildren(...(pairs ? [second] : []), ...inputs.map((input) => {
    const hint = `${idOf(input)}-hint`;
    const field = element("input", { id: idOf(input), type: "text", autocomplete: "off", spellcheck: false, required: true });
    field.setAttribute("aria-describedby", hint);
    field.addEventListener("input", () => field.setCustomValidity(""));
    return element("div", {},
      element("label", { htmlFor: idOf(input) }, input.name),
      field,
      element("p", { id: hint, className: "hint" }, `${expected(input)}.`));
  }));
}

/** Return the body of a request; null after a field has shown its fault. */
export function bodyOf(text) {
  const texts = takesPairs ? { text, text_pair: byId(SECOND).value.replace(/\p{Surrogate}/gu, "\ufffd") } : { text };
  if (!described.length) return JSON.stringify(texts);
  const inputs = {};
  for (const input of described) {
    const field = byId(idOf(input));
    const numbers = field.value.split(/[\s,;]+/).filter((word) => word).map(Number);
    if (!fits(numbers, input)) {
      field.setCustomValidity(`Expected ${expected(input).toLowerCase()}.`);
      field.reportValidity();
      return null;
    }
    inputs[input.name] = isSingle(input) ? numbers[0] : numbers;
  }
  return JSON.stringify({ ...texts, inputs });
}

const isSingle = ({ kind, width }) => kind === "document" && width === null;

function expected(input) {
  const { kind, width, maximum } = input;
  const what = maximum === null ? "number" : "integer";
  const range = maximum === null ? "" : ` from 0 to ${NUMBER.format(maximum)}`;
  if (kind === "token") return `One ${what}${range} for each token, separated by spaces`;
  if (isSingle(input) || width === 1) return `One ${what}${range}`;
  return `${NUMBER.format(width)} ${what}s${range}, separated by spaces`;
}

function fits(numbers, input) {
  const { kind, width, maximum } = input;
  const counts = kind === "token" ? numbers.length > 0 : numbers.length === (width ?? 1);
  const isWhole = (one) => Number.isInteger(one) && one >= 0 && one <= maximum;
  return counts && numbers.every(maximum === null ? Number.isFinite : isWhole);
}
