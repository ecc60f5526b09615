// The settings that a file of Carpool's carries: JSON in a PNG, or the text that the AUTOMATIC1111
// web interface writes, in a PNG, JPEG or WebP.

export async function settingsOf(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  const texts = bytes[0] === 0x89 && bytes[1] === 0x50 ? await pngTexts(bytes) : {};
  if (texts.carpool) {
    try {
      const found = JSON.parse(texts.carpool);
      if (found && typeof found === "object" && Object.keys(found).length) return found;
    } catch { /* not ours after all */ }
  }
  const text = texts.parameters || exifText(bytes);
  return text ? fromText(text) : null;
}

async function pngTexts(bytes) {
  const view = new DataView(bytes.buffer);
  const latin = new TextDecoder("latin1"), utf8 = new TextDecoder();
  const found = {};
  for (let at = 8; at + 12 <= bytes.length;) {
    const size = view.getUint32(at), kind = latin.decode(bytes.subarray(at + 4, at + 8));
    const data = bytes.subarray(at + 8, at + 8 + size);
    const end = data.indexOf(0);
    const name = latin.decode(data.subarray(0, end));
    if (kind === "tEXt") found[name] = latin.decode(data.subarray(end + 1));
    if (kind === "iTXt") {
      const isPacked = data[end + 1] === 1;
      const language = data.indexOf(0, end + 3), translated = data.indexOf(0, language + 1);
      const text = data.subarray(translated + 1);
      found[name] = utf8.decode(isPacked ? await inflated(text) : text);
    }
    if (kind === "IEND") break;
    at += 12 + size;
  }
  return found;
}

async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** EXIF's UserComment in Unicode, wherever it lies in the first megabyte. */
function exifText(bytes) {
  const mark = [0x55, 0x4e, 0x49, 0x43, 0x4f, 0x44, 0x45, 0]; // "UNICODE\0"
  const last = Math.min(bytes.length, 1 << 20) - mark.length;
  for (let at = bytes.indexOf(mark[0]); at >= 0 && at < last; at = bytes.indexOf(mark[0], at + 1)) {
    if (!mark.every((byte, i) => bytes[at + i] === byte)) continue;
    const text = new TextDecoder("utf-16be").decode(bytes.subarray(at + 8, at + 8 + 60000));
    return text.split("\0")[0].replace(/[\uD800-\uDFFF\uFFFD].*$/s, "");
  }
  return "";
}

function fromText(text) {
  const lines = text.split("\n");
  const found = {};
  for (const [, name, value] of lines.pop().matchAll(/([A-Za-z ]+): ([^,]+)/g)) {
    const known = { Steps: "num_inference_steps", "CFG scale": "guidance_scale", Seed: "seed" }[name.trim()];
    if (known && Number.isFinite(Number(value))) found[known] = Number(value);
    const size = name.trim() === "Size" && value.match(/^(\d+)x(\d+)/);
    if (size) [found.width, found.height] = [Number(size[1]), Number(size[2])];
  }
  const negative = lines.findIndex((line) => line.startsWith("Negative prompt: "));
  if (negative >= 0) found.negative_prompt = lines.splice(negative).join("\n").slice(17);
  if (lines.join("").trim()) found.prompt = lines.join("\n");
  return Object.keys(found).length ? found : null;
}
