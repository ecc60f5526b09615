// The settings that a picture carries: Carpool's own, the text that AUTOMATIC1111's web interface
// writes, or JSON of other tools. What is there and cannot be read is said.

import { textsOf } from "./containers.js";
import { parse, whole } from "./json.js";

const FIELDS = {
  Steps: "num_inference_steps", "CFG scale": "guidance_scale", Seed: "seed", "Distilled CFG Scale": "distilled",
};
const STARTS = ["Steps", "Sampler", "Schedule type", "CFG scale", "Seed", "Size", "Model"]; // of a line of fields
const QUIET = /^(Model|Model hash|Version|Size|VAE hash|Lora hashes|TI hashes|Hashes|Civitai .*|Created Date|User)$/;
const UNREAD = /lora|sampler|scheduler|style|control|ip.?adapter|refiner|hires|hrf|upscale|strength|clip.?skip|vae|expansion/i; // of JSON
const ALIASES = { // names of other tools' JSON
  prompt: ["prompt", "positive_prompt", "positivePrompt", "Prompt", "full_prompt"],
  negative_prompt: ["negative_prompt", "negativePrompt", "negativeprompt", "uc", "Negative prompt"],
  num_inference_steps: ["num_inference_steps", "steps", "Steps"],
  guidance_scale: ["guidance_scale", "cfg_scale", "cfgscale", "cfgScale", "scale", "guidance"],
  seed: ["seed", "Seed"], width: ["width"], height: ["height"],
};
const NO_NUMBER = /(?<=[:,[]\s?)(?:NaN|-?Infinity)(?=\s?[,}\]])/g; // as Python writes them
const WEIGHTS = /\([^()]{1,200}:\s*[+-]?\d*\.?\d+\s*\)|\(\([^()]{1,200}\)\)|\[[^[\]]{1,200}\]/;
const EDITING = /\[[^[\]]{0,200}[:|][^[\]]{0,200}\]|\b(?:BREAK|AND)\b/;
const ESCAPE = /\\([()[\]\\])/g;
const TAG = /[ \t]*<(\w+):([^>]{1,500})>/g;
const MOST_NAMES = 6; // in a note
const MOST_FIELDS = 200, MOST_LETTERS = 1 << 18; // of a text that is searched for fields

/**
 * {settings, note}: the settings that a file carries, or null; and what of it is not read.
 *
 * @param entry what `GET /v1/models` says of the model that is to draw: its samplers, and whether it reads weights
 */
export async function readPicture(file, entry = {}) {
  const texts = await textsOf(file);
  const own = object(texts.carpool);
  if (own && Object.keys(own).length) return { settings: own, note: "" };
  const isOfComfy = isGraph(texts.prompt) || isGraph(texts.workflow) || /^(prompt|workflow):/i.test(texts.Make || texts.Model || "");
  if (isOfComfy && !fieldsOf(texts.parameters?.slice(0, MOST_LETTERS).trim().split("\n").at(-1) || "").some(settingOf)) {
    return { settings: null, note: "ComfyUI made this picture: its settings are a graph of nodes, which is not read here." };
  }
  if (!isOfComfy && texts.prompt && (texts.seed || texts.num_inference_steps)) return fromJSON(texts, entry); // Easy Diffusion
  for (const text of [texts.parameters, texts.invokeai_metadata, texts.Comment, texts.UserComment, texts["sd-metadata"], texts.ImageDescription]) {
    if (!text) continue;
    const json = object(text);
    const read = json ? fromJSON(json, entry) : fromText(text, entry);
    if (read.settings) return read;
  }
  return { settings: null, note: "" };
}

function object(text) {
  if (!text?.trimStart().startsWith("{")) return null;
  for (const one of [text, text.replace(NO_NUMBER, "null")]) {
    try {
      const value = parse(one);
      return value && typeof value === "object" ? value : null;
    } catch { /* the next one */ }
  }
  return null;
}

const isGraph = (text) => {
  const value = object(text);
  return Boolean(value && (Array.isArray(value.nodes) || Object.values(value).some((node) => node?.class_type)));
};

function fromJSON(json, entry) {
  const inner = [json.sui_image_params, json.image, json].find((one) => one && typeof one === "object" && !Array.isArray(one));
  const settings = {};
  for (const [name, aliases] of Object.entries(ALIASES)) {
    const value = aliases.map((alias) => inner[alias]).find((one) => one !== undefined && one !== null);
    if (name.endsWith("prompt") ? typeof value === "string" : isNumber(value)) settings[name] = numberOf(value);
  }
  const size = /^\(?(\d{1,6})(?:, ?|x)(\d{1,6})\)?$/.exec(inner.resolution); // Fooocus
  if (size && settings.width === undefined) Object.assign(settings, { width: Number(size[1]), height: Number(size[2]) });
  if (!Object.keys(settings).length) return { settings: null, note: "" };
  const known = new Set([...Object.values(ALIASES).flat(), ...(size ? ["resolution"] : [])]);
  if (addSampler(settings, [inner.sampler, inner.scheduler], entry)) for (const name of ["sampler", "scheduler"]) known.add(name);
  const unread = Object.keys(inner).filter((name) => !known.has(name) && UNREAD.test(name) && isSet(inner[name]));
  return finished(settings, unread);
}

const isNumber = (value) => (typeof value === "number" && Number.isFinite(value)) || /^\d+(\.\d+)?$/.test(value);
const numberOf = (value) => (/^\d+$/.test(value) ? whole(value) : isNumber(value) ? Number(value) : value);
const isSet = (value) => Boolean(value) && value !== "None" && Object.keys(Object(value)).length + Number(Object(value) !== value) > 0;

/** The fields of a line, `name: value, ...`: values may be JSON, with commas and colons of their own. */
function fieldsOf(line) {
  const fields = [];
  const name = /\s*([\w][\w \-/()]*?):\s*/y;
  for (let at = 0; at < line.length && fields.length < MOST_FIELDS;) {
    name.lastIndex = at;
    const match = name.exec(line);
    if (!match) {
      const comma = line.indexOf(",", at);
      if (comma < 0) break;
      at = comma + 1;
      continue;
    }
    const start = name.lastIndex, end = valueEnd(line, start);
    fields.push([match[1], line.slice(start, end).trim()]);
    const comma = line.indexOf(",", end);
    if (comma < 0) break;
    at = comma + 1;
  }
  return fields;
}

/** Where a value ends: at its comma, or with its last quote or bracket. */
function valueEnd(line, start) {
  let depth = 0, isText = false;
  for (let at = start; at < line.length; at += 1) {
    const letter = line[at];
    if (isText) {
      if (letter === "\\") at += 1;
      else if (letter === '"') { isText = false; if (!depth && line[start] === '"') return at + 1; }
    } else if (letter === '"' && (depth || at === start)) isText = true;
    else if ("[{".includes(letter) && (depth || at === start)) depth += 1;
    else if ("]}".includes(letter) && depth) { depth -= 1; if (!depth) return at + 1; }
    else if (letter === "," && !depth) return at;
  }
  if (!depth && !isText) return line.length;
  const comma = line.indexOf(",", start); // quotes or brackets that do not end are letters
  return comma < 0 ? line.length : comma;
}

function settingOf([name, value]) {
  const size = name === "Size" && value.match(/^(\d+)x(\d+)$/);
  if (size) return { width: Number(size[1]), height: Number(size[2]) };
  if (name === "Seed") return /^\d+$/.test(value) ? { seed: whole(value) } : null;
  const known = FIELDS[name];
  return known && value !== "" && Number.isFinite(Number(value)) ? { [known]: Number(value) } : null;
}

/** A sampler's name in the letters that all programs agree on, as the server compares them. */
const plain = (name) => name.toLowerCase().replaceAll("++", "pp").replace(/[^a-z0-9]/g, "").replace(/^(sample)?(k(?=euler|lms|heun|dpm))?/, "")
  .replace(/(gpu|automatic)$/, "").replace(/^eulerancestral/, "eulera").replace(/^dpm2ancestral/, "dpm2a").replace(/^unipcbh2/, "unipc");

/** Add the sampler of [its name, its noise schedule] as the model calls it; false: it offers no such one. */
function addSampler(settings, names, entry) {
  const wanted = names.map((name) => (typeof name === "string" ? plain(name) : "")).join("");
  const sampler = wanted && (entry.schedulers || []).find((name) => plain(name) === wanted);
  if (sampler) settings.scheduler = sampler;
  return Boolean(sampler);
}

function fromText(text, entry) {
  const lines = text.slice(0, MOST_LETTERS).trim().split(/\r?\n/);
  let last = lines.length, fields = [];
  for (let at = lines.length - 1; at >= 0; at -= 1) { // templates of wildcards may follow it
    const found = fieldsOf(lines[at]);
    if (found.length && STARTS.includes(found[0][0]) && found.some(settingOf)) { last = at; fields = found; break; }
  }
  const settings = {};
  for (const field of fields) Object.assign(settings, { ...settingOf(field), ...settings }); // the first one counts
  const { distilled } = settings;
  delete settings.distilled;
  if (distilled !== undefined) {
    if (settings.guidance_scale !== undefined) settings.true_cfg_scale = settings.guidance_scale;
    settings.guidance_scale = distilled;
  }
  const said = lines.slice(0, last);
  const negative = said.findIndex((line) => line.startsWith("Negative prompt:"));
  if (negative >= 0) settings.negative_prompt = said.splice(negative).join("\n").slice(16).trim();
  if (said.join("").trim()) settings.prompt = said.join("\n").trim();
  if (!Object.keys(settings).length) return { settings: null, note: "" };
  const value = (name) => fields.find((field) => field[0] === name)?.[1];
  const read = new Set(addSampler(settings, [value("Sampler"), value("Schedule type")], entry) ? ["Sampler", "Schedule type"] : []);
  const unread = fields.filter((field) => !settingOf(field) && !QUIET.test(field[0]) && !read.has(field[0])).map(([name]) => name);
  const texts = ["prompt", "negative_prompt"].filter((name) => settings[name]);
  const bare = (name) => settings[name].replace(TAG, "").replace(ESCAPE, " ");
  const reads = (entry.parameters || []).some((one) => one.name === "prompt_weights") && texts.some((name) => /[([]/.test(bare(name)));
  for (const name of texts) { // syntax that nothing reads is drawn as words
    const syntax = bare(name).match(EDITING) || (!reads && bare(name).match(WEIGHTS));
    if (syntax) unread.unshift(`weights and other syntax of the ${name === "prompt" ? "" : "negative "}prompt, as ${syntax[0]}`);
    if (!reads) settings[name] = settings[name].replace(ESCAPE, "$1");
  }
  if (reads) settings.prompt_weights = true;
  return finished(settings, unread);
}

/** Adapters that a prompt names are settings; other tags are not read, and none is left as words. */
function finished(settings, unread) {
  const lora = [];
  for (const name of ["prompt", "negative_prompt"]) {
    settings[name] = settings[name]?.replace(TAG, (tag, kind, content) => {
      const [id, scale = "1", ...more] = content.split(":").map((part) => part.trim());
      const isPlain = name === "prompt" && ["lora", "lyco"].includes(kind) && scale !== "" && Number.isFinite(Number(scale));
      if (isPlain && more.every((one) => Number(one) === Number(scale))) lora.push({ id, scale: Number(scale) });
      else unread.push(tag.trim());
      return "";
    }).trim();
    if (settings[name] === undefined) delete settings[name];
  }
  if (lora.length) settings.lora = lora;
  const more = unread.length - MOST_NAMES;
  const names = [...unread.slice(0, MOST_NAMES), ...(more > 0 ? [`${more} more`] : [])];
  return { settings, note: names.length ? `Not read from this picture: ${names.join(", ")}.` : "" };
}
