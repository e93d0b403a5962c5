// Documents of features: read from .npy and CSV files, and drawn as a plot of each feature over the steps.

import { NUMBER, element } from "./elements.js";

export const MAX_PLOTS = 16; // more features would be a very long page
const MAX_CSV_BYTES = 256 * 2 ** 20; // a longer text may not fit into a string
const WIDTH = 720, HEIGHT = 44; // pixels of a plot
const TYPES = { "<f4": Float32Array, "<f8": Float64Array }; // which need no conversion
const SIZES = { f2: 2, f4: 4, f8: 8 }; // bytes of a value

/** Return the series of a file, with its `steps`, its `values` by rows, and the `body` to send; throw an Error. */
export async function readSeries(file, names, { maxSteps, maxBytes }) {
  if (/\.csv$/i.test(file.name)) {
    if (file.size > MAX_CSV_BYTES) throw new Error("Expected at most 256 MiB of CSV. Save the values by numpy.save.");
    const read = parseCsv(await file.text(), names, maxSteps);
    checkBytes(read.body.size, maxBytes);
    return read;
  }
  checkBytes(file.size, maxBytes);
  return parseNpy(await file.arrayBuffer(), names, maxSteps);
}

function checkBytes(size, maxBytes) {
  if (size <= maxBytes) return;
  throw new Error(`Expected at most ${NUMBER.format(maxBytes)} bytes of .npy, got ${NUMBER.format(size)}. Send a part of the series.`);
}

/** Return the names of features, or the first and the last of many. */
export function listed(names) {
  return names.length <= 8 ? names.join(", ") : `${names.slice(0, 3).join(", ")}, … and ${names.at(-1)} (${names.length})`;
}

function checkSteps(steps, maxSteps) {
  if (!steps) throw new Error("Expected at least one step, got none.");
  if (steps <= maxSteps) return;
  throw new Error(`Expected at most ${NUMBER.format(maxSteps)} steps, got ${NUMBER.format(steps)}. Send a part of the series.`);
}

function parseNpy(buffer, names, maxSteps) {
  const bytes = new Uint8Array(buffer), view = new DataView(buffer);
  const isNpy = bytes.length > 12 && String.fromCharCode(...bytes.subarray(1, 6)) === "NUMPY" && [1, 2].includes(bytes[6]);
  if (!isNpy) throw new Error("Expected a file of numpy.save (.npy), or CSV with the suffix .csv. Convert the file.");
  const start = bytes[6] === 1 ? 10 : 12;
  const end = start + (bytes[6] === 1 ? view.getUint16(8, true) : view.getUint32(8, true));
  const header = new TextDecoder().decode(bytes.subarray(start, end));
  const type = header.match(/'descr': '([^']*)'/)?.[1];
  const shape = header.match(/'shape': \(([\d, ]*)\)/)?.[1].split(",").filter((size) => size.trim()).map(Number) ?? [];
  const isRead = /^[<>]f[248]$/.test(type) && header.includes("'fortran_order': False");
  if (!isRead || shape.length !== 2 || shape[1] !== names.length) {
    throw new Error(`Expected float16, float32 or float64 [steps, ${names.length}] in C order, got ${type ?? "no type"} [${shape.join(", ")}]. `
      + "Save such an array.");
  }
  checkSteps(shape[0], maxSteps);
  const size = shape[0] * shape[1] * SIZES[type.slice(1)];
  if (bytes.length !== end + size) throw new Error(`Expected ${end + size} bytes by the header, got ${bytes.length}. Copy the file again.`);
  const values = valuesOf(buffer, end, shape[0] * shape[1], type);
  checkFinite(values, names);
  return { steps: shape[0], values, body: buffer };
}

/** Return the values of an array in a file. */
function valuesOf(buffer, start, count, type) {
  if (TYPES[type]) return new TYPES[type](buffer.slice(start));
  const view = new DataView(buffer, start), isLittle = type[0] === "<", size = SIZES[type.slice(1)];
  const read = {
    f2: (at) => fromHalf(view.getUint16(at, isLittle)),
    f4: (at) => view.getFloat32(at, isLittle),
    f8: (at) => view.getFloat64(at, isLittle),
  }[type.slice(1)];
  const values = new Float64Array(count);
  for (let place = 0; place < count; place++) values[place] = read(place * size);
  return values;
}

/** Return the value of a float16, by its bits. */
function fromHalf(bits) {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const sign = bits >> 15 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
}

/** Refuse what the server refuses too: it reads float32. */
function checkFinite(values, names) {
  const place = values.findIndex((value) => !Number.isFinite(Math.fround(value)));
  if (place < 0) return;
  const step = Math.floor(place / names.length), name = names[place % names.length];
  throw new Error(`Expected finite float32 numbers, got ${values[place]} for ${name} of step ${NUMBER.format(step)}. Replace it.`);
}

function parseCsv(text, names, maxSteps) {
  const lines = text.replace(/^\ufeff/, "").split(/\r?\n/).filter((line) => line.trim());
  if (lines[0]?.includes(";")) throw new Error("Expected commas between the columns, got semicolons. Save the file as CSV with commas.");
  const titles = lines[0]?.split(",").map((title) => title.trim().replace(/^"(.*)"$/, "$1")) ?? [];
  const hasTitles = titles.some((title) => title !== "" && Number.isNaN(Number(title)));
  if (hasTitles && titles.join() !== names.join()) {
    throw new Error(`Expected the columns ${listed(names)}, got ${listed(titles)}. Rename or reorder them.`);
  }
  const first = hasTitles ? 1 : 0, steps = lines.length - first;
  checkSteps(steps, maxSteps);
  const values = new Float32Array(steps * names.length);
  for (let step = 0; step < steps; step++) {
    const cells = lines[step + first].split(",");
    const bad = cells.length !== names.length || cells.some((one) => !one.trim() || !Number.isFinite(Math.fround(Number(one))));
    if (bad) throw new Error(`Expected ${names.length} numbers in row ${step + first + 1}, got ${lines[step + first].slice(0, 80)}. Correct the row.`);
    cells.forEach((one, place) => { values[step * names.length + place] = Number(one); });
  }
  return { steps, values, body: new Blob([headerOf(steps, names.length), values]) };
}

/** Return the header of numpy.save, whose length is a multiple of 64. */
function headerOf(steps, width) {
  const text = `{'descr': '<f4', 'fortran_order': False, 'shape': (${steps}, ${width}), }`;
  const size = text.length + 1 + ((64 - ((11 + text.length) % 64)) % 64);
  const bytes = new Uint8Array(10 + size);
  bytes.set([0x93, ...[..."NUMPY"].map((one) => one.charCodeAt(0)), 1, 0, size & 255, size >> 8]);
  bytes.set(new TextEncoder().encode(`${text.padEnd(size - 1)}\n`), 10);
  return bytes;
}

/** Return a figure for each of some features, with the spans of evidence behind its line. */
export function plotsOf({ steps, values }, names, places, spans) {
  return places.map((place) => plotOf(names[place], place, { steps, values, width: names.length }, spans));
}

function plotOf(name, place, series, spans) {
  const [lows, highs] = rangesOf(place, series);
  const low = lows.reduce((one, other) => Math.min(one, other)), high = highs.reduce((one, other) => Math.max(one, other));
  const range = `${Number(low.toPrecision(4))} to ${Number(high.toPrecision(4))}`;
  const canvas = element("canvas", { width: WIDTH, height: HEIGHT, ariaLabel: `${name}: ${range}` });
  canvas.setAttribute("role", "img");
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  pen.fillStyle = `rgb(${style.getPropertyValue("--mark")})`;
  for (const { start_token: start, end_token: end } of spans) {
    const left = Math.floor(start / series.steps * WIDTH);
    pen.fillRect(left, 0, Math.max(2, Math.ceil(end / series.steps * WIDTH) - left), HEIGHT);
  }
  pen.fillStyle = style.getPropertyValue("--accent");
  const at = (value) => (HEIGHT - 3) * (1 - (value - low) / (high - low || 1)) + 1;
  const columns = lows.length, wide = Math.max(1, WIDTH / columns);
  for (let x = 0; x < columns; x++) {
    pen.fillRect(x * WIDTH / columns, at(highs[x]), wide, Math.max(1, at(lows[x]) - at(highs[x])));
  }
  return element("figure", {}, element("figcaption", {}, name, element("span", { className: "hint" }, range)), canvas);
}

/** Return the minimum and the maximum of a feature in each column of pixels. */
function rangesOf(place, { steps, values, width }) {
  const columns = Math.min(steps, WIDTH);
  const lows = new Float64Array(columns).fill(Infinity), highs = new Float64Array(columns).fill(-Infinity);
  for (let step = 0; step < steps; step++) {
    const column = Math.floor(step * columns / steps), value = values[step * width + place];
    if (value < lows[column]) lows[column] = value;
    if (value > highs[column]) highs[column] = value;
  }
  return [lows, highs];
}
