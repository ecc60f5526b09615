// The fields of the form: each with its label, its error, and where it helps, a slider.

import { byId, el } from "./dom.js";

export const TITLES = {
  num_inference_steps: "Steps", guidance_scale: "Guidance", true_cfg_scale: "True guidance",
  negative_prompt: "Negative prompt", scheduler: "Sampler", num_frames: "Frames", fps: "Frames a second", strength: "Strength",
  max_sequence_length: "Longest prompt, in tokens", lora: "Adapters", n: "Pictures of each",
};
const HELP = {
  guidance_scale: "how closely to follow the prompt", strength: "how much of the picture is drawn anew: 0 to 1",
  sigmas: "a list of numbers", true_cfg_scale: "above 1: the negative prompt counts",
};
const SIDES = [["1:1", 1], ["4:3", 4 / 3], ["3:4", 3 / 4], ["16:9", 16 / 9], ["9:16", 9 / 16]];
const MOST_STEPS = 100; // on a slider; the number beside it takes more

export const title = (name) => TITLES[name] || (name[0].toUpperCase() + name.slice(1)).replaceAll("_", " ");

/** One field with its label and the place of its error. */
export function field(name, input, label = title(name), help = "", beside = []) {
  input.id = `f-${name}`;
  input.name = name;
  input.setAttribute("aria-describedby", `e-${name}`);
  return el("div", { "data-field": name }, el("label", { for: input.id }, label), beside.length ? el("div.beside", {}, input, beside) : input,
    help && el("p.muted", {}, help), el("p.error", { id: `e-${name}`, role: "alert" }));
}

/** A number, and a slider over the values that are usual. */
function sliding(name, known, limits, [low, high, step]) {
  const fallback = known.default === null ? "" : String(known.default);
  const input = el("input.short", { type: "number", placeholder: fallback || "own", ...limits });
  const slider = el("input", { type: "range", min: low, max: high, step, "aria-label": `${title(name)}, as a slider` });
  const follow = () => { slider.value = input.value === "" ? fallback || (low + high) / 2 : input.value; };
  input.follow = follow;
  input.addEventListener("input", follow);
  slider.addEventListener("input", () => { input.value = slider.value; });
  follow();
  return field(name, input, title(name), "", [slider]);
}

const SLIDERS = {
  num_inference_steps: (known, limits) => [{ min: 1, max: limits.num_inference_steps, step: 1 }, [1, Math.min(MOST_STEPS, limits.num_inference_steps || MOST_STEPS), 1]],
  guidance_scale: () => [{ step: "any" }, [0, 20, 0.1]],
  strength: () => [{ min: 0, max: 1, step: "any" }, [0, 1, 0.01]],
  num_frames: (known, limits) => [{ min: 1, max: limits.num_frames, step: 1 }, [1, Math.min(limits.num_frames || 121, 121), 1]],
};

/** The field of a parameter that has a place of its own, where the model has it. */
export function slider(name, parameters, limits) {
  if (!(name in parameters)) return [];
  return [sliding(name, parameters[name], ...SLIDERS[name](parameters[name], limits))];
}

/** The seed: empty means a new one each time; the dice throw one, the lock keeps the last one. */
export function seedField(lastSeed, onChange) {
  const input = el("input", { type: "text", inputMode: "numeric", placeholder: "a new one each time", autocomplete: "off" });
  const roll = () => String(crypto.getRandomValues(new Uint32Array(1))[0]);
  const set = (text) => { input.value = text; follow(); onChange(); };
  const dice = el("button.icon", { type: "button", "aria-label": "Throw a seed", title: "Throw a seed", onclick: () => set(roll()) }, "⚄");
  const lock = el("button", { type: "button", title: "Keep this seed for the next drawings", onclick: () => set(input.value.trim() ? "" : lastSeed() ?? roll()) }, "Keep");
  const follow = () => {
    const isKept = Boolean(input.value.trim());
    lock.setAttribute("aria-pressed", isKept);
  };
  input.follow = follow;
  input.addEventListener("input", follow);
  follow();
  return field("seed", input, "Seed, or several", "", [dice, lock]);
}

/** Width and height, with a swap and usual shapes. */
export function sizeFields(entry, onSize) {
  const multiple = entry.size_multiple_px || 1;
  const [width, height] = (entry.default_size || "").split("x").map(Number);
  const side = (name, value) => field(name, el("input", { type: "number", min: multiple, step: multiple, placeholder: value || "own" }));
  const value = (name, own) => byId(`f-${name}`).value || (own ? String(own) : "");
  const swap = el("button.icon", { type: "button", title: "Swap width and height", "aria-label": "Swap width and height",
    onclick: () => onSize({ width: value("height", height), height: value("width", width) }) }, "⇄");
  const chips = !width ? [] : SIDES.map(([label, ratio]) => {
    const round = (px) => Math.max(multiple, Math.round(px / multiple) * multiple);
    const [w, h] = [round(Math.sqrt(width * height * ratio)), round(Math.sqrt(width * height / ratio))];
    return el("button.chip", { type: "button", title: `${w} x ${h}`, onclick: () => onSize({ width: w, height: h }) }, label);
  });
  return el("div", {}, el("div.sides", {}, side("width", width), swap, side("height", height)),
    el("div.chips", { role: "group", "aria-label": "Shapes" }, chips));
}

/** An adapter with its scale. */
export function adapterField(name) {
  const on = el("input", { type: "checkbox", name: "lora", value: name });
  const scale = el("input", { type: "number", step: 0.1, value: 1, "aria-label": `Scale of ${name}`, "data-scale": name });
  return el("div.adapter", {}, el("label.inline", {}, on, name), scale);
}

/** The field of any parameter of a pipeline, by its kind. */
export function anyField(known, schedulers) {
  const fallback = known.default === null ? "" : String(known.default);
  let input;
  if (known.kind === "bool") {
    input = el("select", {}, [["", `as the model has it${fallback && ` (${fallback})`}`], ["true", "yes"], ["false", "no"]].map(([value, text]) => el("option", { value }, text)));
  } else if (known.name === "scheduler") {
    input = el("select", {}, ["", ...schedulers].map((value) => el("option", { value }, value || `the model's own (${fallback})`)));
  } else if (known.kind === "int" || known.kind === "float") {
    input = el("input", { type: "number", step: known.kind === "int" ? 1 : "any", placeholder: fallback || "the model's own" });
  } else if (known.name.includes("prompt")) input = el("textarea", { rows: 2, placeholder: fallback });
  else input = el("input", { type: "text", placeholder: fallback || (known.kind === "numbers" ? "[1, 0.5, ...]" : "") });
  return field(known.name, input, title(known.name), HELP[known.name]);
}
