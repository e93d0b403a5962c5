// Send a document and show the server's answer. Content from the document and the server enters the page
// only as text: the page's Content-Security-Policy forbids markup from strings.

import {
  NUMBER, byId, cell, duration, element, fill, fillFacts, fillTable, head, number, part, percent, row,
  isShown, marked, scientific, signed, tokens,
} from "./elements.js";
import { textOf } from "./files.js";
import { describeHeads, showHeads } from "./heads.js";
import { bodyOf, describeInputs } from "./inputs.js";
import { showModels } from "./models.js";
import { showProgram } from "./program.js";
import { chooseSeries, describeSeries, drawSeries, features, series } from "./series_field.js";

const [form, text, file, key, status] = ["form", "text", "file", "key", "status"].map(byId);

let fileText = null; // text of the chosen file: a textarea would drop its carriage returns
let pending = null; // AbortController of the pending request; null if there is none
let explaining = null; // AbortController of the pending request for chosen evidence
let answered = ""; // the document whose answer is shown
let answeredBody = ""; // the request with that document
let bundle = null; // digest of the bundle whose description is shown
let hasEvidence = true; // whether the model has evidence for its answers
let tokensPerCharacter = 0; // of the last answered document; 0 before the first answer
let maxBytes = Infinity; // maximum bytes of a request

/** A failure, which the page shows in place of an answer. */
class Problem extends Error {
  constructor(title, detail, code = 0) {
    super(detail);
    Object.assign(this, { title, code });
  }
}

/** Return the JSON of the server's answer; throw a Problem, or the AbortError of a signal. */
async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key.value.trim()) headers.set("Authorization", `Bearer ${key.value.trim()}`);
  const response = await fetch(path, { cache: "no-store", ...options, headers }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Problem("No answer", "The server cannot be reached, or the connection was lost.");
  });
  const body = await response.json().catch((error) => {
    if (error.name === "AbortError") throw error;
  });
  if (response.ok && body) return body;
  const again = Number(response.headers.get("Retry-After"));
  const detail = body?.detail ?? "Expected an answer in JSON, got something else. Check the proxy between this page and the server.";
  const wait = again ? ` Try again in ${NUMBER.format(again)} s.` : "";
  if (response.status === 401) byId("key-field").hidden = false;
  throw new Problem(`The server answers ${response.status}`, detail + wait, response.status);
}

/** Return the options of a request with a document. */
const post = (body, signal) => (
  { method: "POST", headers: { "Content-Type": features ? "application/x-npy" : "application/json" }, body, signal }
);

/** Return the answer, its query, and the reason why it has no evidence; null if it has evidence. */
async function infer(body, passages, signal) {
  const ask = async (query, reason) => ({ answer: await request(`infer${query}`, post(body, signal)), query, reason });
  if (!passages) return ask("", "It was not requested.");
  try {
    return await ask(`?evidence=${passages}`, null);
  } catch (problem) {
    if (problem.code !== 422) throw problem;
    return ask("", `The server says: “${problem.message}” The page repeated the request without evidence.`);
  }
}

/** Show the evidence for a label or value of the answer. */
async function explain(head, name) {
  explaining?.abort();
  const current = (explaining = new AbortController());
  const content = answered;
  const query = new URLSearchParams({ evidence: byId("passages").valueAsNumber || 5, explain: `${head}:${name}`, outputs: head });
  status.textContent = `Waiting for the evidence for ${name} …`;
  try {
    const answer = await request(`infer?${query}`, post(answeredBody, current.signal));
    if (current !== explaining) return;
    showEvidence(answer.explained[0], "", content);
    byId("evidence-title").scrollIntoView({ block: "nearest" });
    status.textContent = `Evidence for ${name}; passages highlighted: ${highlightedIn(answer.explained[0])}.`;
  } catch (error) {
    if (current !== explaining || error.name === "AbortError") return;
    showEvidence(null, `The server says: “${error.message}”`, content);
    status.textContent = "";
  }
}

/** Return the passages to highlight: none if none stands out. */
const painted = (evidence) => (!evidence || evidence.spread ? [] : evidence.spans);
const highlightedIn = (evidence) => painted(evidence).filter((span) => isShown(span) || features).length;

async function classify() {
  if (features && !series) {
    showProblem(new Problem("No series", "Expected a file of numpy.save (.npy) or CSV. Choose or drop one."));
    return;
  }
  // Replace lone surrogates: they cannot be sent as UTF-8.
  const content = features ? "" : (fileText ?? text.value).replace(/\p{Surrogate}/gu, "\ufffd");
  const body = features ? series.body : bodyOf(content);
  if (body === null) return;
  pending?.abort();
  explaining?.abort();
  const current = (pending = new AbortController());
  byId("stop").hidden = false;
  status.textContent = "Waiting for the answer …";
  const sent = performance.now();
  try {
    const passages = hasEvidence ? byId("passages").valueAsNumber : 0;
    const { answer, query, reason } = await infer(body, passages, current.signal);
    const seconds = (performance.now() - sent) / 1000;
    if (answer.bundle !== bundle) await describe(); // another bundle may have other heads
    if (current !== pending) return;
    answeredBody = body;
    if (content) tokensPerCharacter = answer.tokens_total / content.length;
    showAnswer(answer, reason, content, seconds);
    showProgram(query, body, key.value.trim() !== "", answer);
  } catch (error) {
    if (current !== pending) return;
    if (error.name === "AbortError") status.textContent = "Stopped.";
    else showProblem(error);
  } finally {
    if (current === pending) {
      pending = null;
      byId("stop").hidden = true;
    }
  }
}

/** Show the server, its model and its parity with PyTorch. */
async function describe() {
  let failure = null;
  try {
    const [info, parity] = await Promise.all([request("info"), request("parity")]);
    showInfo(info);
    showParity(parity);
  } catch (problem) {
    failure = problem;
    byId("about").hidden = byId("parity").hidden = true;
  }
  const { model_stats: models } = await request("v2/models/stats").catch(() => ({ model_stats: [] }));
  const isAnswered = failure?.code !== 404; // otherwise the server has no model for this path
  const hasRemedy = isAnswered ? failure?.code === 401 && !key.value : models.length > 0; // the key, or the links
  if (failure) byId("model").textContent = hasRemedy ? "" : failure.message;
  showModels(models.map(({ name }) => name), isAnswered);
}

function show(id) {
  for (const section of ["problem", "answer"]) byId(section).hidden = section !== id;
  const place = byId("outcome").getBoundingClientRect();
  if (place.top > innerHeight - 150 || place.top < 0) byId("outcome").scrollIntoView();
}

function showProblem(problem) {
  fill("problem", [element("h2", {}, problem.title ?? "This page failed"), element("p", {}, problem.message)]);
  status.textContent = "";
  show("problem");
  if (problem.code === 401) key.focus();
}

function showAnswer(answer, without, content, seconds) {
  answered = content;
  const decision = showHeads(answer, content);
  byId("read").textContent = answer.truncated
    ? `The model saw only the ${answer.policy}: ${NUMBER.format(answer.tokens_used)} of ${tokens(answer.tokens_total)}.`
    : `The model saw the whole document: ${tokens(answer.tokens_total)} (policy ${answer.policy}).`;
  byId("read").className = answer.truncated ? "warning" : "";
  showEvidence(answer.evidence, without, content);
  showTimes(answer.timings, seconds);
  byId("answered-by").textContent = answer.bundle;
  show("answer");
  byId("document").scrollTop = Math.max(0, (byId("passage-1")?.offsetTop ?? 0) - 50);
  status.textContent = `${decision}, after ${duration(seconds)}; `
    + `passages highlighted: ${highlightedIn(answer.evidence)}.`;
}

function showEvidence(evidence, without, content) {
  byId("evidence").hidden = !evidence?.spans.length;
  byId("document").hidden = features !== null;
  // A file that was chosen after the request has another body.
  if (answeredBody === series?.body) drawSeries(painted(evidence));
  if (!evidence) {
    byId("evidence-note").textContent = `This answer has no evidence. ${without}`;
    return;
  }
  const { logit, offset, spans, spread, name } = evidence;
  byId("evidence-note").textContent =
    `The logit of ${name ?? "the class"} is ${signed(logit)}: ${signed(logit - offset)} from the tokens and ${signed(offset)} from the bias. `
    + (!spans.length ? "No passage adds more than as many average tokens."
      : spread ? "Nothing stands out: the evidence is spread over the document."
      : "These passages add more than as many average tokens.");
  fill("document", highlighted(content, painted(evidence)));
  fillTable("spans", spans.map((span, index) => {
    const link = { href: `#passage-${index + 1}`, ariaLabel: `Passage ${index + 1}` };
    const unseen = features ? `Steps ${span.start_token} to ${span.end_token - 1}` : `Tokens ${span.start_token} to ${span.end_token - 1}, which have no characters.`;
    return row(
      number(isShown(span) && !spread ? element("a", link, `${index + 1}`) : `${index + 1}`),
      cell(element("span", { className: "clamp" }, span.text_pair ? "Second text: " : "", span.text ?? unseen)),
      number(signed(span.contribution)),
      number(signed(span.above_average)),
    );
  }));
}

/** Return the text with a mark for each passage that has characters, numbered from the strongest. */
function highlighted(content, spans) {
  const strongest = spans[0]?.above_average;
  return marked(content, spans.map((span, place) => ({ ...span, number: place + 1 })), (span, passage) => {
    const mark = element("mark", { id: `passage-${span.number}`, tabIndex: -1 }, passage);
    mark.dataset.number = span.number;
    mark.style.setProperty("--strength", span.above_average / strongest);
    return mark;
  });
}

function showTimes(timings, seconds) {
  const stages = ["tokenize", "queue", "inference"].map((stage) => [stage, timings[`${stage}_seconds`]]);
  const rest = seconds - stages.reduce((sum, [, took]) => sum + took, 0);
  stages.push(["rest", Math.max(0, rest)]);
  const names = { tokenize: "Tokenize", queue: "Queue", inference: "Inference", rest: "Other" };
  fill("stages", stages.map(([stage, took]) => part(took / seconds, stage)));
  fillFacts("times", [
    ...stages.map(([stage, took]) => [names[stage], duration(took), stage]),
    ["Total", duration(seconds)],
  ]);
  byId("predicted").textContent =
    `Queue and inference were predicted to take ${duration(timings.predicted_seconds)}. `
    + "Other time is for the network and the evidence.";
}

function showInfo(info) {
  bundle = info.bundle;
  maxBytes = info.limits.max_body_bytes;
  describeSeries(info.features, info.limits);
  const reads = info.tokenizer || features ? "" : " It has no tokenizer: send token ids to POST /infer.";
  describeInputs(info.extra_inputs, info.text_pairs);
  byId("model").textContent = `${info.name}. ${describeHeads(info.heads, info.explainable)}${reads}`;
  document.title = `${info.name}: send a document`;
  hasEvidence = info.evidence;
  for (const id of ["passages-field", "evidence-title", "evidence-note"]) byId(id).hidden = !hasEvidence;
  fillFacts("facts", [
    ["Engine", info.engine],
    ["Precision", precisionOf(info)],
    ["Maximum tokens", NUMBER.format(info.limits.max_tokens)],
    ["Long documents", info.limits.long_documents],
    ["Version", info.version],
  ]);
  byId("bundle").textContent = info.bundle;
  byId("about").hidden = false;
  byId("golden-note").textContent = info.safe ? "The server runs the fallbacks only: a kernel was outside tolerance. " : "";
}

/** Read and draw the series of a file. */
async function takeSeries(chosen) {
  const { steps } = await chooseSeries(chosen).catch((error) => {
    throw new Problem("The file cannot be read", error.message);
  });
  byId("problem").hidden = true;
  status.textContent = `Read ${chosen.name}: ${NUMBER.format(steps)} steps.`;
}

function precisionOf({ precision, node_precisions: nodes }) {
  if (!nodes) return precision;
  return `auto: ${Object.entries(nodes).map(([name, count]) => `${count} in ${name}`).join(", ")}`;
}

function showParity({ golden, within }) {
  const verdict = within ? "within" : "OUTSIDE";
  byId("parity").textContent = `Parity with PyTorch: ${verdict} tolerance`;
  byId("parity").className = `badge ${within ? "ship" : "hold"}`;
  byId("parity").hidden = false;
  const failed = golden.filter((one) => !one.passed).length;
  const errors = (one) => [one.error, one.score_error ?? 0].map((error) => (error === "inf" ? Infinity : error));
  const worst = Math.max(0, ...golden.map((one) => Math.max(...errors(one)) / one.bound));
  byId("golden-note").append(
    `${golden.length - failed} of ${golden.length} golden cases are within tolerance; `
    + `the largest error is ${percent(worst)} of its bound.`);
  fillTable("golden", golden.map((one) => {
    const made = row(head(one.case), cell(one.subject), cell(one.shape.join(" × ")),
      cell(one.passed ? "within" : "OUTSIDE"), number(scientific(one.error)),
      number(scientific(one.score_error)), number(scientific(one.bound)));
    made.className = one.passed ? "" : "outside";
    return made;
  }));
}

/** Read the text of a chosen or dropped file. */
async function take(files) {
  try {
    if (files.length !== 1) throw new Problem("Too many files", `Expected one file, got ${files.length}. Choose one.`);
    if (features) return await takeSeries(files[0]);
    if (files[0].size > maxBytes) {
      const sizes = `${NUMBER.format(files[0].size)} bytes; this server accepts at most ${NUMBER.format(maxBytes)}`;
      throw new Problem("The file is too large", `It has ${sizes}.`);
    }
    fileText = await textOf(files[0]);
    text.value = fileText;
    sized();
    status.textContent = `Read ${files[0].name}.`;
  } catch (error) {
    file.value = "";
    showProblem(error instanceof Problem ? error : new Problem("The file cannot be read", error.message));
  }
}

/** Show the length of the document, and an estimate of its tokens: only an answer counts them. */
function sized() {
  const { length } = fileText ?? text.value;
  const estimate = ` About ${tokens(Math.round(length * tokensPerCharacter))}, as many for each character as in the last answer.`;
  byId("size").textContent = `Length: ${NUMBER.format(length)}.${tokensPerCharacter ? estimate : ""}`;
}

/** Keep the text for a reload of this tab, or take the text that was kept. */
function keepText(isLeaving) {
  const place = `text ${location.pathname}`;
  try {
    if (isLeaving) sessionStorage.setItem(place, text.value);
    else text.value ||= sessionStorage.getItem(place) ?? "";
  } catch {
    // The browser allows no storage, or not for so long a text.
  }
}

text.addEventListener("input", () => {
  fileText = null;
  file.value = "";
  sized();
});
file.addEventListener("change", () => file.files.length && take(file.files));
form.addEventListener("submit", (event) => {
  event.preventDefault();
  classify();
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    form.requestSubmit();
  }
});
byId("answer").addEventListener("click", ({ target }) => {
  const chosen = target.closest("button.explain");
  if (chosen) explain(chosen.dataset.head, chosen.dataset.name);
});
byId("stop").addEventListener("click", () => pending?.abort());
key.addEventListener("change", describe);

// Accept a file anywhere on the page: a browser would open one that misses the field.
const hasFile = (event) => event.dataTransfer.types.includes("Files");
addEventListener("dragover", (event) => {
  if (!hasFile(event)) return;
  event.preventDefault();
  form.classList.add("dragging");
});
addEventListener("dragleave", (event) => event.relatedTarget ?? form.classList.remove("dragging"));
addEventListener("drop", (event) => {
  form.classList.remove("dragging");
  if (!hasFile(event)) return;
  event.preventDefault();
  file.files = event.dataTransfer.files;
  take(event.dataTransfer.files);
});

addEventListener("pagehide", () => keepText(true));
keepText(false);
if (text.value) sized();
describe();
