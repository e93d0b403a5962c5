// The page sends a document to the server and shows the answer. Content from the document and the
// server enters the page only as text: the page's Content-Security-Policy forbids markup from strings.

import {
  byId, cell, duration, element, fill, fillFacts, fillTable, head, NUMBER, number, part, percent,
  row, scientific, signed, tokens,
} from "./elements.js";
import { headlineOf, purposeOf, rowsOf } from "./heads.js";

const [form, text, file, key, status] = ["form", "text", "file", "key", "status"].map(byId);

let fileText = null; // unchanged text of the chosen file: a textarea removes carriage returns
let activeRequest = null; // AbortController of the last request, until it is answered
let shownBundle = null; // digest of the bundle that the page describes
let maxBytes = Infinity; // maximum size of a request
let heads = {}; // the model's heads, by their names

/** An error that the page shows instead of an answer. */
class Problem extends Error {
  constructor(title, detail, code = 0) {
    super(detail);
    Object.assign(this, { title, code });
  }
}

/** Returns the JSON of the server's answer; throws a Problem, or the AbortError of a signal. */
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
  const seconds = Number(response.headers.get("Retry-After"));
  const detail = body?.detail ?? "The response is not JSON: a proxy in front of the server may have sent it.";
  const wait = seconds ? ` Try again in ${NUMBER.format(seconds)} s.` : "";
  if (response.status === 401) byId("key-field").hidden = false;
  throw new Problem(`The server answers ${response.status}`, detail + wait, response.status);
}

/** Returns the answer, and the reason if it has no evidence: some models and documents have none. */
async function infer(content, passages, signal) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, signal };
  const send = (query) => request(`infer${query}`, { ...options, body: JSON.stringify({ text: content }) });
  if (!passages) return [await send(""), "It was not requested."];
  try {
    return [await send(`?evidence=${passages}`), null];
  } catch (problem) {
    if (problem.code !== 422) throw problem;
    return [await send(""), `The server says: “${problem.message}” The page then asked without evidence.`];
  }
}

async function classify() {
  activeRequest?.abort();
  const controller = (activeRequest = new AbortController());
  // Replace lone surrogates, which are not characters: the server would refuse them.
  const content = (fileText ?? text.value).replace(/\p{Surrogate}/gu, "\ufffd");
  byId("stop").hidden = false;
  status.textContent = "Waiting for the answer …";
  const sent = performance.now();
  try {
    const [answer, noEvidence] = await infer(content, byId("passages").valueAsNumber, controller.signal);
    if (controller !== activeRequest) return;
    showAnswer(answer, noEvidence, content, (performance.now() - sent) / 1000);
    if (answer.bundle !== shownBundle) await loadServerInfo();
  } catch (error) {
    if (controller !== activeRequest) return;
    if (error.name === "AbortError") status.textContent = "Stopped.";
    else showProblem(error);
  } finally {
    if (controller === activeRequest) {
      activeRequest = null;
      byId("stop").hidden = true;
    }
  }
}

/** Shows the server's model, and its comparison with PyTorch. */
async function loadServerInfo() {
  try {
    const [info, parity] = await Promise.all([request("info"), request("parity")]);
    showInfo(info);
    showParity(parity);
  } catch (problem) {
    byId("about").hidden = byId("parity").hidden = true;
    byId("model").textContent = problem.code === 401 && !key.value ? "" : problem.message;
  }
}

function show(id) {
  for (const section of ["problem", "answer"]) byId(section).hidden = section !== id;
  const place = byId("outcome").getBoundingClientRect();
  if (place.top > innerHeight - 150 || place.top < 0) byId("outcome").scrollIntoView();
}

function showProblem(problem) {
  fill("problem", [element("h2", {}, problem.title ?? "The page failed"), element("p", {}, problem.message)]);
  status.textContent = "";
  show("problem");
  if (problem.code === 401) key.focus();
}

function showAnswer(answer, noEvidence, content, seconds) {
  const [headline, remark] = headlineOf(answer, heads);
  byId("label").textContent = headline;
  byId("probability").textContent = remark;
  byId("read").textContent = answer.truncated
    ? `The model saw only the ${answer.policy}: ${NUMBER.format(answer.tokens_used)} of ${tokens(answer.tokens_total)}.`
    : `The model saw the whole document: ${tokens(answer.tokens_total)} (policy ${answer.policy}).`;
  byId("read").className = answer.truncated ? "warning" : "";
  fillTable("scores", rowsOf(answer, heads));
  showEvidence(answer.evidence, noEvidence, content);
  showTimes(answer.timings, seconds);
  byId("answered-by").textContent = answer.bundle;
  show("answer");
  byId("document").scrollTop = Math.max(0, (byId("passage-1")?.offsetTop ?? 0) - 50);
  const found = answer.evidence?.spans.filter((span) => span.text).length ?? 0;
  status.textContent = `${headline}, ${remark ? `${remark}, ` : ""}after ${duration(seconds)}; `
    + `passages highlighted: ${found}.`;
}

/** Highlights the passages; without evidence, shows the reason. */
function showEvidence(evidence, noEvidence, content) {
  byId("evidence").hidden = !evidence?.spans.length;
  if (!evidence) {
    byId("evidence-note").textContent = `The answer has no evidence. ${noEvidence}`;
    return;
  }
  const { logit, offset, spans, name } = evidence;
  byId("evidence-note").textContent =
    `The logit of ${name ?? "the class"} is ${signed(logit)}: `
    + `the tokens contribute ${signed(logit - offset)}, the offset ${signed(offset)}. `
    + (spans.length ? "These passages contribute the most above as many average tokens."
      : "No passage contributes more than as many average tokens.");
  fill("document", highlighted(content, spans));
  fillTable("spans", spans.map((span, index) => {
    const link = { href: `#passage-${index + 1}`, ariaLabel: `Passage ${index + 1}` };
    const withoutText = `Tokens ${span.start_token} to ${span.end_token - 1}, which have no characters.`;
    return row(
      number(span.text ? element("a", link, `${index + 1}`) : `${index + 1}`),
      cell(element("span", { className: "clamp" }, span.text ?? withoutText)),
      number(signed(span.contribution)),
      number(signed(span.above_average)),
    );
  }));
}

/** Returns the text, with a mark around each span that has characters; the strongest span is number 1. */
function highlighted(content, spans) {
  const nodes = [];
  let point = 0, index = 0; // end of the text so far: in code points, as the server counts, and in UTF-16 units
  const takeUpTo = (end) => {
    const start = index;
    for (; point < end; point++) index += content.codePointAt(index) > 0xffff ? 2 : 1;
    return content.slice(start, index);
  };
  const strongest = spans[0]?.above_average;
  const numbered = spans.map((span, place) => ({ ...span, number: place + 1 }));
  for (const span of numbered.filter((span) => span.text).sort((one, other) => one.start - other.start)) {
    nodes.push(takeUpTo(span.start));
    // If two spans share a character, each with some of its bytes, the first span shows it.
    const mark = element("mark", { id: `passage-${span.number}`, tabIndex: -1 }, takeUpTo(span.end));
    mark.dataset.number = span.number;
    mark.style.setProperty("--strength", span.above_average / strongest);
    nodes.push(mark);
  }
  return [...nodes, content.slice(index)];
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
    + "Other is the network and the evidence.";
}

function showInfo(info) {
  shownBundle = info.bundle;
  maxBytes = info.limits.max_body_bytes;
  heads = info.heads;
  const inputs = info.tokenizer ? "" : " It takes only token ids, which this page cannot send.";
  byId("model").textContent = `${Object.values(heads).map(purposeOf).join(" ")}${inputs}`;
  fillFacts("facts", [
    ["Engine", info.engine],
    ["Precision", precisionOf(info)],
    ["Maximum tokens", NUMBER.format(info.limits.max_tokens)],
    ["Long documents", info.limits.long_documents],
    ["Version", info.version],
  ]);
  byId("bundle").textContent = info.bundle;
  byId("about").hidden = false;
  byId("golden-note").textContent = info.safe ? "The server runs only portable bodies, after a breach of parity. " : "";
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
  const worst = Math.max(0, ...golden.map((one) => (one.error === "inf" ? Infinity : one.error) / one.bound));
  byId("golden-note").append(
    `${golden.length - failed} of ${golden.length} golden cases are within tolerance; `
    + `the worst error is ${percent(worst)} of its bound.`);
  fillTable("golden", golden.map((one) => {
    const made = row(head(one.case), cell(one.subject), cell(one.shape.join(" × ")),
      cell(one.passed ? "within" : "OUTSIDE"), number(scientific(one.error)), number(scientific(one.bound)));
    made.className = one.passed ? "" : "outside";
    return made;
  }));
}

/** Reads the text of a chosen or dropped file. */
async function readFile(files) {
  try {
    if (files.length !== 1) throw new Problem("Only one file", `Choose one file, got ${files.length}.`);
    if (files[0].size > maxBytes) {
      const sizes = `${NUMBER.format(maxBytes)} bytes, got ${NUMBER.format(files[0].size)}`;
      throw new Problem("The file is too large", `A file must have at most ${sizes}.`);
    }
    const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }); // true keeps the byte order mark
    fileText = decoder.decode(await files[0].arrayBuffer());
    text.value = fileText;
    showLength();
    status.textContent = `Read ${files[0].name}.`;
  } catch (error) {
    file.value = "";
    showProblem(error instanceof Problem ? error : new Problem("The file cannot be read", "It must be text in UTF-8."));
  }
}

const showLength = () => { byId("size").textContent = `Length: ${NUMBER.format((fileText ?? text.value).length)}.`; };

text.addEventListener("input", () => {
  fileText = null;
  file.value = "";
  showLength();
});
file.addEventListener("change", () => file.files.length && readFile(file.files));
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
byId("stop").addEventListener("click", () => activeRequest?.abort());
key.addEventListener("change", loadServerInfo);

// Accept a dropped file anywhere: the browser would open a file that misses the field, and leave the page.
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
  readFile(event.dataTransfer.files);
});

loadServerInfo();
