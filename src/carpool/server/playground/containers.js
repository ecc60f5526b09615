// The texts that picture files carry: chunks of a PNG, EXIF of PNG, JPEG, WebP and AVIF.
// Nothing is unpacked beyond a bound: a file may be made to be a thousand times its size.

const MOST_BYTES = 64 << 20; // of a file that are read
const MOST_TEXT = 4 << 20; // bytes of all its texts, unpacked
const MOST_PARTS = 20_000;
const TAGS = { 0x010e: "ImageDescription", 0x010f: "Make", 0x0110: "Model", 0x9286: "UserComment" };
const latin = new TextDecoder("latin1"); // browsers take Windows-1252: compare ASCII alone

/** Texts of a file by their names; EXIF's by the names of its tags. */
export async function textsOf(file) {
  const part = file.size > MOST_BYTES ? file.slice(0, MOST_BYTES) : file;
  const bytes = new Uint8Array(await part.arrayBuffer());
  const is = (text, at) => latin.decode(bytes.subarray(at, at + text.length)) === text;
  try {
    if (is("PNG", 1)) return await pngTexts(bytes);
    if (bytes[0] === 0xff && bytes[1] === 0xd8) return exifTexts(jpegExif(bytes));
    if (is("RIFF", 0) && is("WEBP", 8)) return exifTexts(webpExif(bytes));
    if (is("ftyp", 4)) return boxedTexts(bytes);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error; // it ends in the middle of something
  }
  return {};
}

const viewOf = (bytes) => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);

async function pngTexts(bytes) {
  const view = viewOf(bytes), found = {};
  let left = MOST_TEXT;
  for (let at = 8, parts = 0; at + 12 <= bytes.length && parts < MOST_PARTS; parts += 1) {
    const size = view.getUint32(at), kind = latin.decode(bytes.subarray(at + 4, at + 8));
    const data = bytes.subarray(at + 8, at + 8 + size);
    at += 12 + size;
    if (kind === "IEND" || at > bytes.length) break;
    if (kind === "eXIf") Object.assign(found, { ...exifTexts(data), ...found });
    const end = data.indexOf(0), name = latin.decode(data.subarray(0, Math.max(end, 0)));
    if (!["tEXt", "zTXt", "iTXt"].includes(kind) || end < 1 || name in found) continue;
    let text = data.subarray(end + 1), isPacked = kind === "zTXt";
    if (kind === "zTXt") text = text.subarray(1); // its method
    if (kind === "iTXt") {
      isPacked = text[0] === 1;
      const language = text.indexOf(0, 2), translated = text.indexOf(0, language + 1);
      if (language < 0 || translated < 0) continue;
      text = text.subarray(translated + 1);
    }
    if (isPacked) text = await inflated(text, left);
    if (text === null || text.length > left) continue;
    left -= text.length;
    found[name] = decoded(text);
  }
  return found;
}

/** Unpacked bytes; null if they are damaged or more than `most`. */
async function inflated(bytes, most) {
  const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")).getReader();
  const parts = [];
  let size = 0;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      size += value.length;
      if (size > most) { reader.cancel().catch(() => {}); return null; }
      parts.push(value);
    }
  } catch { return null; }
  const all = new Uint8Array(size);
  let at = 0;
  for (const part of parts) { all.set(part, at); at += part.length; }
  return all;
}

/** UTF-8, which many write where the format says Latin-1. */
function decoded(bytes) {
  try { return new TextDecoder("utf-8", { fatal: true }).decode(bytes); } catch { return latin.decode(bytes); }
}

function jpegExif(bytes) {
  const view = viewOf(bytes);
  for (let at = 2, parts = 0; at + 4 <= bytes.length && bytes[at] === 0xff && parts < MOST_PARTS; parts += 1) {
    if (bytes[at + 1] === 0xff) { at += 1; continue; } // a fill byte
    if (bytes[at + 1] === 0xda) break;
    const size = view.getUint16(at + 2);
    if (at + 2 + size > bytes.length) break;
    if (bytes[at + 1] === 0xe1 && latin.decode(bytes.subarray(at + 4, at + 8)) === "Exif") return bytes.subarray(at + 10, at + 2 + size);
    at += 2 + size;
  }
  return null;
}

function webpExif(bytes) {
  const view = viewOf(bytes);
  for (let at = 12, parts = 0; at + 8 <= bytes.length && parts < MOST_PARTS; parts += 1) {
    const size = view.getUint32(at + 4, true), data = bytes.subarray(at + 8, at + 8 + size);
    if (data.length < size) break;
    if (latin.decode(bytes.subarray(at, at + 4)) === "EXIF") {
      return latin.decode(data.subarray(0, 4)) === "Exif" ? data.subarray(6) : data;
    }
    at += 8 + size + size % 2;
  }
  return null;
}

/** EXIF of AVIF, which may lie anywhere in it: the first block that has texts. */
function boxedTexts(bytes) {
  for (let at = bytes.indexOf(0x2a, 8); at >= 0; at = bytes.indexOf(0x2a, at + 1)) {
    const start = bytes[at - 1] === 0x49 && bytes[at - 2] === 0x49 ? at - 2 : at - 3; // "II*\0" or "MM\0*"
    const found = exifTexts(bytes.subarray(start));
    if (Object.keys(found).length) return found;
  }
  return {};
}

/** The texts among the tags of EXIF, in either order of bytes. */
function exifTexts(bytes) {
  const found = {};
  if (!bytes || bytes.length < 8) return found;
  const view = viewOf(bytes), order = view.getUint16(0), isLittle = order === 0x4949; // "II", or "MM"
  if ((!isLittle && order !== 0x4d4d) || view.getUint16(2, isLittle) !== 42) return found;
  const seen = new Set(), waiting = [view.getUint32(4, isLittle)];
  while (waiting.length) {
    const ifd = waiting.pop();
    if (seen.has(ifd) || ifd + 2 > bytes.length) continue;
    seen.add(ifd);
    const count = view.getUint16(ifd, isLittle);
    for (let at = ifd + 2; at + 12 <= Math.min(bytes.length, ifd + 2 + 12 * count); at += 12) {
      const tag = view.getUint16(at, isLittle), size = view.getUint32(at + 4, isLittle);
      if (tag === 0x8769) waiting.push(view.getUint32(at + 8, isLittle));
      if (!(tag in TAGS) || TAGS[tag] in found || size > MOST_TEXT) continue;
      const place = size > 4 ? view.getUint32(at + 8, isLittle) : at + 8;
      const data = bytes.subarray(place, place + size);
      if (data.length < size) continue;
      found[TAGS[tag]] = tag === 0x9286 ? comment(data, isLittle) : decoded(data).replace(/\0+$/, "");
    }
  }
  return found;
}

/** EXIF's UserComment: eight letters name its encoding. */
function comment(data, isLittle) {
  const kind = latin.decode(data.subarray(0, 8)), text = data.subarray(8);
  if (!kind.startsWith("UNICODE")) return decoded(/^(ASCII|\0)/.test(kind) ? text : data).replace(/\0+$/, "");
  const [big, little] = ["utf-16be", "utf-16le"].map((name) => new TextDecoder(name).decode(text).split("\0")[0]);
  const ascii = (said) => said.replace(/[^\t\n\r -~]/g, "").length; // writers disagree on the order
  const isOther = ascii(little) === ascii(big) ? isLittle : ascii(little) > ascii(big);
  return (isOther ? little : big).replace(/[\uD800-\uDFFF]$/, "").replace(/\uFFFD.*$/s, "");
}
