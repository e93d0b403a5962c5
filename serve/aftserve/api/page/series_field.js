// The field for a series of features: its file, its plots and the choice among many features.

import { NUMBER, byId, element, fill } from "./elements.js";
import { MAX_PLOTS, listed, plotsOf, readSeries } from "./series.js";

export let features = null; // names of the features; null for a model of texts or token ids
export let series = null; // the series of the chosen file
let limits = {};
let marks = []; // the spans of evidence on the plots

/** Ask for a file of features in place of a text, if the model takes features. */
export function describeSeries(described, { max_tokens: maxSteps, max_array_bytes: maxBytes }) {
  const names = described?.names ?? null;
  limits = { maxSteps, maxBytes };
  if (JSON.stringify(names) === JSON.stringify(features)) return; // keep the series and the choice
  features = names;
  series = null;
  byId("text").required = !features;
  byId("text-field").hidden = features !== null;
  byId("series-hint").hidden = !features;
  byId("file-label").textContent = features ? "File of a series" : "Text file";
  byId("file").accept = features ? ".npy,.csv" : "";
  byId("series-hint").textContent = features && "Drop or choose a .npy or .csv file with a row for each step and the columns "
    + `${listed(features)}. Ctrl+Enter or ⌘+Enter sends.`;
  offerChannels();
  drawSeries([]);
}

/** Read and draw the series of a file; throw an Error, after which there is no series. */
export async function chooseSeries(file) {
  series = null;
  drawSeries([]);
  series = await readSeries(file, features, limits);
  drawSeries([]);
  return series;
}

/** Draw the chosen features, with the spans of evidence behind their lines. */
export function drawSeries(spans) {
  marks = spans;
  byId("plots").hidden = !series;
  fill("plots", series ? plotsOf(series, features, chosenChannels(), marks) : []);
}

/** List the features to choose from, if they are more than the page draws at a time. */
function offerChannels() {
  const names = features ?? [];
  byId("channels-field").hidden = names.length <= MAX_PLOTS;
  fill("channels", names.map((name, place) => element("option", { selected: place < MAX_PLOTS }, name)));
  byId("channels-hint").textContent =
    `Choose up to ${MAX_PLOTS} of ${NUMBER.format(names.length)}; of more, the first ${MAX_PLOTS} are drawn.`;
}

const chosenChannels = () => [...byId("channels").selectedOptions].slice(0, MAX_PLOTS).map(({ index }) => index);

byId("channels").addEventListener("change", () => drawSeries(marks));
