// Sends a document, and shows what the server says of it. What others wrote, the document's author or
// the server, gets into the page as text alone: the policy of the page forbids anything else.

const byId = (id) => document.getElementById(id);
const [form, text, file, key, status] = ["form", "text", "file", "key", "status"].map(byId);
const NUMBER = new Intl.NumberFormat("en");

let fileText = null; // of the chosen file as it is: a textarea has no CR
let underWay = null; // the AbortController of the last request, until it is answered
let bundle = null; // digest of the one that is described
let mostBytes = Infinity; // of a request

/** What there is to say instead of an answer. */
class Problem extends Error {
  constructor(title, detail, code = 0) {
    super(detail);
    Object.assign(this, { title, code });
  }
}

/** The JSON that the server answers; throws a Problem, or the AbortError of a signal. */
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
  const detail = body?.detail ?? "What came is no JSON: something between this page and the server may have sent it.";
  const wait = again ? ` Worth another try in ${NUMBER.format(again)} s.` : "";
  if (response.status === 401) byId("key-field").hidden = false;
  throw new Problem(`The server answers ${response.status}`, detail + wait, response.status);
}

/** The answer, and why it has no evidence, if so: not every model has, nor every document. */
async function infer(content, passages, signal) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, signal };
  const ask = (query) => request(`infer${query}`, { ...options, body: JSON.stringify({ text: content }) });
  if (!passages) return [await ask(""), "It was not asked for."];
  try {
    return [await ask(`?evidence=${passages}`), null];
  } catch (problem) {
    if (problem.code !== 422) throw problem;
    return [await ask(""), `The server says: “${problem.message}” This page then asked without.`];
  }
}

async function classify() {
  underWay?.abort();
  const mine = (underWay = new AbortController());
  // Half a surrogate pair is no character, and no server takes it.
  const content = (fileText ?? text.value).replace(/\p{Surrogate}/gu, "\ufffd");
  byId("stop").hidden = false;
  status.textContent = "Waiting for the answer …";
  const sent = performance.now();
  try {
    const [answer, without] = await infer(content, byId("passages").valueAsNumber, mine.signal);
    if (mine !== underWay) return;
    showAnswer(answer, without, content, (performance.now() - sent) / 1000);
    if (answer.bundle !== bundle) await describe();
  } catch (error) {
    if (mine !== underWay) return;
    if (error.name === "AbortError") status.textContent = "Stopped.";
    else showProblem(error);
  } finally {
    if (mine === underWay) {
      underWay = null;
      byId("stop").hidden = true;
    }
  }
}

/** Says what answers, and how it compares with PyTorch. */
async function describe() {
  try {
    const [info, parity] = await Promise.all([request("info"), request("parity")]);
    showInfo(info);
    showParity(parity);
  } catch (problem) {
    byId("about").hidden = byId("parity").hidden = true;
    byId("model").textContent = problem.code === 401 && !key.value ? "" : problem.message;
  }
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const cell = (content) => element("td", {}, content);
const number = (content) => element("td", { className: "number" }, content);
const head = (content) => element("th", { scope: "row" }, content);
const row = (...cells) => element("tr", {}, ...cells);
const fill = (id, children) => byId(id).replaceChildren(...children);
const fillTable = (id, rows) => byId(id).tBodies[0].replaceChildren(...rows);
const fillFacts = (id, facts) =>
  fill(id, facts.map(([name, value, stage]) => {
    const term = element("dt", {}, name);
    if (stage) term.dataset.stage = stage;
    return element("div", {}, term, element("dd", {}, value));
  }));

function part(share, stage) {
  const made = element("div");
  made.style.width = `${100 * share}%`;
  if (stage) made.dataset.stage = stage;
  return made;
}

function percent(share) {
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  if (share < 1 && share >= 0.9995) return "> 99.9 %";
  return `${(100 * share).toFixed(1)} %`;
}

function duration(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
}

const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toPrecision(3)}`;
const tokens = (count) => `${NUMBER.format(count)} ${count === 1 ? "token" : "tokens"}`;
const scientific = (value) => (value === "inf" ? value : value.toExponential(1));

function show(id) {
  for (const section of ["problem", "answer"]) byId(section).hidden = section !== id;
  const place = byId("outcome").getBoundingClientRect();
  if (place.top > innerHeight - 150 || place.top < 0) byId("outcome").scrollIntoView();
}

function showProblem(problem) {
  fill("problem", [element("h2", {}, problem.title ?? "This page has a fault"), element("p", {}, problem.message)]);
  status.textContent = "";
  show("problem");
  if (problem.code === 401) key.focus();
}

function showAnswer(answer, without, content, seconds) {
  const scores = Object.entries(answer.scores).sort(([, one], [, other]) => other - one);
  byId("label").textContent = answer.label;
  byId("probability").textContent = `with a score of ${percent(answer.scores[answer.label])}`;
  byId("read").textContent = answer.truncated
    ? `The model saw the ${answer.policy} alone: ${NUMBER.format(answer.tokens_used)} of ${tokens(answer.tokens_total)}.`
    : `The model saw all of it: ${tokens(answer.tokens_total)} (policy ${answer.policy}).`;
  byId("read").className = answer.truncated ? "warning" : "";
  fillTable("scores", scores.map(([label, score]) => {
    const bar = element("td", { className: "bar" }, element("div", {}, part(score)));
    return row(head(label), bar, number(percent(score)));
  }));
  showEvidence(answer.evidence, without, content);
  showTimes(answer.timings, seconds);
  byId("answered-by").textContent = answer.bundle;
  show("answer");
  byId("document").scrollTop = Math.max(0, (byId("passage-1")?.offsetTop ?? 0) - 50);
  const found = answer.evidence?.spans.filter((span) => span.text).length ?? 0;
  status.textContent = `${answer.label}, ${percent(answer.scores[answer.label])}, after ${duration(seconds)}; `
    + `passages highlighted: ${found}.`;
}

function showEvidence(evidence, without, content) {
  byId("evidence").hidden = !evidence?.spans.length;
  if (!evidence) {
    byId("evidence-note").textContent = `There is none. ${without}`;
    return;
  }
  const { logit, offset, spans } = evidence;
  byId("evidence-note").textContent =
    `The logit of the class is ${signed(logit)}: ${signed(logit - offset)} of all tokens, ${signed(offset)} of none. `
    + (spans.length ? "These passages add the most above the average of as many tokens."
      : "No passage adds more than as many tokens do on average.");
  fill("document", highlighted(content, spans));
  fillTable("spans", spans.map((span, index) => {
    const link = { href: `#passage-${index + 1}`, ariaLabel: `Passage ${index + 1}` };
    const unseen = `Tokens ${span.start_token} to ${span.end_token - 1}, which have no characters.`;
    return row(
      number(span.text ? element("a", link, `${index + 1}`) : `${index + 1}`),
      cell(element("span", { className: "clamp" }, span.text ?? unseen)),
      number(signed(span.contribution)),
      number(signed(span.above_average)),
    );
  }));
}

/** The text and, among it, a mark for each span that has some of it, numbered from the strongest. */
function highlighted(content, spans) {
  const nodes = [];
  let point = 0, index = 0; // how far it got: in code points, as the server counts, and in UTF-16 units
  const upTo = (end) => {
    const start = index;
    for (; point < end; point++) index += content.codePointAt(index) > 0xffff ? 2 : 1;
    return content.slice(start, index);
  };
  const strongest = spans[0]?.above_average;
  const numbered = spans.map((span, place) => ({ ...span, number: place + 1 }));
  for (const span of numbered.filter((span) => span.text).sort((one, other) => one.start - other.start)) {
    nodes.push(upTo(span.start));
    // Where two share a character, each with some of its bytes, the first has it.
    const mark = element("mark", { id: `passage-${span.number}`, tabIndex: -1 }, upTo(span.end));
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
  const names = { tokenize: "Tokenize", queue: "Queue", inference: "Inference", rest: "The rest" };
  fill("stages", stages.map(([stage, took]) => part(took / seconds, stage)));
  fillFacts("times", [
    ...stages.map(([stage, took]) => [names[stage], duration(took), stage]),
    ["Altogether", duration(seconds)],
  ]);
  byId("predicted").textContent =
    `Queue and inference were predicted to take ${duration(timings.predicted_seconds)}. `
    + "The rest is the way there and back, and the evidence.";
}

function showInfo(info) {
  bundle = info.bundle;
  mostBytes = info.limits.max_body_bytes;
  const reads = info.tokenizer ? "" : " This model takes token ids alone; no text will do.";
  byId("model").textContent = `Tells ${info.labels.length} classes apart.${reads}`;
  fillFacts("facts", [
    ["Engine", info.engine],
    ["Precision", precisionOf(info)],
    ["Most tokens", NUMBER.format(info.limits.max_tokens)],
    ["Long documents", info.limits.long_documents],
    ["Version", info.version],
  ]);
  byId("bundle").textContent = info.bundle;
  byId("about").hidden = false;
  byId("golden-note").textContent = info.safe ? "With portable bodies only, after a breach of parity. " : "";
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
    + `the worst error is ${percent(worst)} of what is allowed.`);
  fillTable("golden", golden.map((one) => {
    const made = row(head(one.case), cell(one.subject), cell(one.shape.join(" × ")),
      cell(one.passed ? "within" : "OUTSIDE"), number(scientific(one.error)), number(scientific(one.bound)));
    made.className = one.passed ? "" : "outside";
    return made;
  }));
}

/** Takes the text of a file, unless it is none. */
async function take(files) {
  try {
    if (files.length !== 1) throw new Problem("One file at a time", "Each is a document of its own.");
    if (files[0].size > mostBytes) {
      const sizes = `${NUMBER.format(files[0].size)} bytes, this server takes ${NUMBER.format(mostBytes)}`;
      throw new Problem("The file is too large", `It has ${sizes}.`);
    }
    const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }); // which is to keep it
    fileText = decoder.decode(await files[0].arrayBuffer());
    text.value = fileText;
    sized();
    status.textContent = `Read ${files[0].name}.`;
  } catch (error) {
    file.value = "";
    showProblem(error instanceof Problem ? error : new Problem("The file cannot be read", "It is no text in UTF-8."));
  }
}

const sized = () => { byId("size").textContent = `Length: ${NUMBER.format((fileText ?? text.value).length)}.`; };

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
byId("stop").addEventListener("click", () => underWay?.abort());
key.addEventListener("change", describe);

// A file may be dropped anywhere: a browser would leave the page for one that misses the field.
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

describe();
