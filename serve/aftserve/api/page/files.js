// The text of a file, in UTF-8 or in UTF-16 with a byte order mark.

const OTHERS = [
  ["%PDF-", "a PDF document", "Extract its text first, for example by pdftotext"],
  ["PK\x03\x04", "a ZIP archive, such as a .docx or .odt document", "Save the document as plain text first"],
  ["\xd0\xcf\x11\xe0", "an Office document, such as .doc", "Save the document as plain text first"],
];
const UTF_16 = { "\xff\xfe": "utf-16le", "\xfe\xff": "utf-16be" }; // by the byte order mark

/** Return the text of a file; throw an Error that names another kind of file, and the remedy. */
export async function textOf(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  const start = String.fromCharCode(...bytes.subarray(0, 5));
  const other = OTHERS.find(([mark]) => start.startsWith(mark));
  if (other) throw new Error(`Expected text, got ${other[1]}. ${other[2]}, then choose the text.`);
  const encoding = UTF_16[start.slice(0, 2)];
  if (!encoding && bytes.includes(0)) throw new Error(remedy("bytes of zero, as UTF-16 without a byte order mark has", "utf-16le"));
  try {
    // Of UTF-8 the byte order mark is a part of the document that is sent.
    return new TextDecoder(encoding ?? "utf-8", { fatal: true, ignoreBOM: !encoding }).decode(bytes);
  } catch {
    throw new Error(remedy(encoding ? "incomplete UTF-16" : "other bytes", encoding ?? "latin1"));
  }
}

const remedy = (got, encoding) =>
  `Expected text in UTF-8, got ${got}. If it is text, convert it: iconv -f ${encoding} -t utf-8 FILE > TEXT.`;
