// The request of an answer as a command of curl, and the answer as JSON.

import { byId } from "./elements.js";

const MAX_WORD_CHARACTERS = 30_000; // Linux takes words of 128 KiB, in which a character has up to 3 bytes
const MAX_LINE_CHARACTERS = 1e6; // of JSON, which the browser lays out soon

let shown = null; // the answer

/** Show the command of a request, and its answer. */
export function showProgram(query, body, hasKey, answer) {
  shown = answer;
  byId("command").textContent = commandOf(query, body, hasKey);
  byId("copied").textContent = "";
  showJson();
}

function commandOf(query, body, hasKey) {
  const key = hasKey ? ` -H "Authorization: Bearer $KEY"` : "";
  const start = `curl ${quoted(new URL(`infer${query}`, document.baseURI).href)}${key}`;
  if (typeof body !== "string") {
    return `# Save the series by numpy.save as series.npy first.\n${start} -H 'Content-Type: application/x-npy' --data-binary @series.npy`;
  }
  if (body.length <= MAX_WORD_CHARACTERS) return `${start} --json ${quoted(body)}`;
  return `# Save {"text": "..."} with the document as request.json first.\n${start} --json @request.json`;
}

const quoted = (word) => `'${word.replaceAll("'", "'\\''")}'`;

function showJson() {
  if (!byId("program").open || !shown) return;
  const text = JSON.stringify(shown, null, 2);
  byId("json").textContent = text.length <= MAX_LINE_CHARACTERS ? text
    : `${text.slice(0, MAX_LINE_CHARACTERS)}\n… The command gives all of it.`;
}

byId("program").addEventListener("toggle", showJson);
byId("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(byId("command").textContent);
    byId("copied").textContent = "Copied.";
  } catch { // without HTTPS a page may not write there
    getSelection().selectAllChildren(byId("command"));
    byId("copied").textContent = "Press Ctrl+C or ⌘+C to copy.";
  }
});
