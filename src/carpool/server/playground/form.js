// The form of a drawing, made from what `GET /v1/models` says of the model.

import { byId, el, plural } from "./dom.js";
import { Pictures } from "./pictures.js";

const TITLES = {
  num_inference_steps: "Steps", guidance_scale: "Guidance", true_cfg_scale: "True guidance",
  negative_prompt: "Negative prompt", scheduler: "Sampler", num_frames: "Frames", fps: "Frames a second", strength: "Strength",
  max_sequence_length: "Longest prompt, in tokens",
};
const HELP = {
  guidance_scale: "how closely to follow the prompt", strength: "how much of the picture is drawn anew: 0 to 1",
  sigmas: "a list of numbers", true_cfg_scale: "above 1: the negative prompt counts",
};
const PLACED = new Set(["prompt", "width", "height", "num_inference_steps", "guidance_scale", "num_frames",
  "strength", "image", "mask", "input_reference", "seed", "n"]);
const SIDES = [["1:1", 1], ["4:3", 4 / 3], ["3:4", 3 / 4], ["16:9", 16 / 9], ["9:16", 9 / 16]];

const EXAMPLES = {
  shapes: ["a red circle on a blue background", "a yellow star on a black background", "a green ring on a white background"],
  "shapes-video": ["a red circle moving right on a black background", "a blue square moving up on a white background"],
};
const ANY = ["a lighthouse on a cliff at dusk", "a fox in the snow, photograph", "a bowl of oranges, oil painting"];
const ANY_CLIPS = ["waves breaking on a rocky shore", "a paper boat drifting down a stream"];

const title = (name) => TITLES[name] || (name[0].toUpperCase() + name.slice(1)).replaceAll("_", " ");

/** One field with its label and the place of its error. */
function field(name, input, label = title(name), help = "") {
  input.id = `f-${name}`;
  input.name = name;
  input.setAttribute("aria-describedby", `e-${name}`);
  return el("div", { "data-field": name }, el("label", { for: input.id }, label), input,
    help && el("p.muted", {}, help), el("p.error", { id: `e-${name}`, role: "alert" }));
}

export class Form {
  /**
   * @param root the form's element
   * @param onDraw is given a list of requests: {path, body}
   * @param onChange is called after every change
   */
  constructor(root, onDraw, onChange) {
    Object.assign(this, { root, onDraw, onChange, entry: null, parameters: {} });
    root.addEventListener("submit", (event) => { event.preventDefault(); this.draw(); });
    root.addEventListener("input", () => onChange());
    root.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.draw(); }
    });
  }

  /** Build the form for a model; `models` are all that are served. */
  build(entry, models, onModel) {
    this.entry = entry;
    this.parameters = Object.fromEntries(entry.parameters.map((one) => [one.name, one]));
    const has = (name) => name in this.parameters;
    const limits = entry.limits || {};
    const parts = [];
    if (models.length > 1) {
      const select = el("select", { onchange: () => onModel(select.value) },
        models.map((one) => el("option", { value: one.id, selected: one.id === entry.id }, one.state === "unloaded" ? `${one.id} (is loaded when asked)` : one.id)));
      parts.push(field("model", select, "Model"));
    }
    if (has("prompt")) {
      const text = el("textarea", { rows: 3, placeholder: `What shall it show? Such as: ${this.examples[0]}`, spellcheck: true });
      const lines = el("label.inline.muted", {}, el("input", { type: "checkbox", id: "f-lines" }), "each line is a prompt of its own");
      parts.push(el("div", {}, field("prompt", text, "Prompt"), lines));
    }
    parts.push(el("p.error", { id: "e-", role: "alert" }));
    parts.push(el("div.draw-row", {},
      el("button.primary", { type: "submit", title: "Ctrl+Enter" }, this.isVideo ? "Make the clip" : "Draw"),
      el("p.muted", { id: "estimate", role: "status" })));
    this.pictures = null;
    if (limits.pictures) {
      this.pictures = new Pictures(limits.pictures, has("mask"), () => { this.taskChanged(); this.onChange(); });
      parts.push(el("div", { "data-field": "image" }, this.pictures.node, el("p.error", { id: "e-image", role: "alert" }), el("p.error", { id: "e-mask", role: "alert" })));
    }
    if (has("width") && has("height")) parts.push(this.#size(entry));
    const pair = [];
    if (has("num_inference_steps")) pair.push(this.#number("num_inference_steps", { min: 1, max: limits.num_inference_steps, step: 1 }));
    if (has("guidance_scale")) pair.push(this.#number("guidance_scale", { step: "any" }));
    if (has("num_frames") && this.isVideo) {
      pair.push(this.#number("num_frames", { min: 1, max: limits.num_frames, step: 1 }));
      pair.push(field("fps", el("input", { type: "number", min: 1, max: 240, step: "any", placeholder: "the model's own" }), title("fps")));
    }
    if (has("strength")) pair.push(this.#number("strength", { min: 0, max: 1, step: "any" }));
    pair.push(field("seed", el("input", { type: "text", inputMode: "numeric", placeholder: "a new one" }), "Seed, or several"));
    if (!this.isVideo) pair.push(field("n", el("input", { type: "number", min: 1, max: limits.n || 10, step: 1, value: 1 }), "Pictures of each"));
    parts.push(el("div.pair", {}, pair));
    if (entry.lora.length) parts.push(this.#adapters(entry.lora));
    const rest = entry.parameters.filter((one) => !PLACED.has(one.name) && one.kind !== "picture");
    if (rest.length) {
      parts.push(el("details", {}, el("summary", {}, `More settings (${rest.length})`),
        el("div.fields", {}, rest.map((one) => this.#any(one)))));
    }
    this.root.replaceChildren(...parts);
    this.taskChanged();
  }

  /** Prompts for a stranger to begin with. */
  get examples() { return EXAMPLES[this.entry.id] || (this.isVideo ? ANY_CLIPS : ANY); }

  get isVideo() { return this.entry.tasks[0].endsWith("-video"); }

  get isMesh() { return this.entry.tasks[0].endsWith("-mesh"); }

  get isSound() { return this.entry.tasks[0].endsWith("-audio"); }

  /** The task that the pictures given ask for, as the server chooses it. */
  get task() {
    const given = this.pictures ? this.pictures.given : { images: 0, mask: false };
    const takes = (task, name) => (this.parameters[name]?.tasks || []).includes(task);
    const wanted = [given.images && (this.isVideo || this.isMesh ? "input_reference" : "image"), given.mask && "mask"].filter(Boolean);
    return this.entry.tasks.find((task) => wanted.every((name) => takes(task, name))) || this.entry.tasks[0];
  }

  /** Show what the present task takes. */
  taskChanged() {
    const task = this.task;
    for (const node of this.root.querySelectorAll("[data-field]")) {
      const known = this.parameters[node.dataset.field];
      if (known && known.kind !== "picture") node.hidden = !known.tasks.includes(task);
    }
  }

  #number(name, limits) {
    const known = this.parameters[name];
    const fallback = known.default === null ? "the model's own" : String(known.default);
    return field(name, el("input", { type: "number", placeholder: fallback, ...limits }), title(name), "");
  }

  #size(entry) {
    const multiple = entry.size_multiple_px || 1;
    const [width, height] = (entry.default_size || "").split("x").map(Number);
    const side = (name, value) => field(name, el("input", { type: "number", min: multiple, step: multiple, placeholder: value || "the model's own" }));
    const chips = !width ? [] : SIDES.map(([label, ratio]) => {
      const round = (px) => Math.max(multiple, Math.round(px / multiple) * multiple);
      const [w, h] = [round(Math.sqrt(width * height * ratio)), round(Math.sqrt(width * height / ratio))];
      return el("button.chip", { type: "button", title: `${w} x ${h}`, onclick: () => { this.fill({ width: w, height: h }); this.onChange(); } }, label);
    });
    return el("div", {}, el("div.pair", {}, side("width", width), side("height", height)),
      el("div.chips", { role: "group", "aria-label": "Shapes" }, chips));
  }

  #adapters(names) {
    return el("fieldset", { "data-field": "lora" }, el("legend.label", {}, "Adapters"),
      names.map((name) => this.#adapter(name)), el("p.error", { id: "e-lora", role: "alert" }));
  }

  #adapter(name) {
    const on = el("input", { type: "checkbox", name: "lora", value: name });
    const scale = el("input", { type: "number", step: 0.1, value: 1, "aria-label": `Scale of ${name}`, "data-scale": name });
    return el("div.adapter", {}, el("label.inline", {}, on, name), scale);
  }

  #any(one) {
    const fallback = one.default === null ? "" : String(one.default);
    let input;
    if (one.kind === "bool") {
      input = el("select", {}, [["", `as the model has it${fallback && ` (${fallback})`}`], ["true", "yes"], ["false", "no"]].map(([value, text]) => el("option", { value }, text)));
    } else if (one.name === "scheduler") {
      input = el("select", {}, ["", ...this.entry.schedulers].map((value) => el("option", { value }, value || `the model's own (${fallback})`)));
    } else if (one.kind === "int" || one.kind === "float") {
      input = el("input", { type: "number", step: one.kind === "int" ? 1 : "any", placeholder: fallback || "the model's own" });
    } else if (one.name.includes("prompt")) input = el("textarea", { rows: 2, placeholder: fallback });
    else input = el("input", { type: "text", placeholder: fallback || (one.kind === "numbers" ? "[1, 0.5, ...]" : "") });
    return field(one.name, input, title(one.name), HELP[one.name]);
  }

  /** What a field says, in the type of its parameter; undefined where it says nothing. */
  #value(name) {
    const input = byId(`f-${name}`);
    if (!input || input.closest("[hidden]") || input.value.trim() === "") return undefined;
    const kind = this.parameters[name]?.kind, text = input.value.trim();
    if (kind === "bool") return text === "true";
    if (kind === "int" || kind === "float" || input.type === "number") return Number(text);
    if (kind === "numbers") return text.startsWith("[") ? JSON.parse(text) : text.split(/[\s,]+/).map(Number);
    return input.value;
  }

  /** The settings of the form, as the API names them; seed and n aside. */
  settings() {
    const found = {};
    for (const one of this.entry.parameters) {
      if (one.name === "prompt" || one.kind === "picture") continue;
      const value = this.#value(one.name);
      if (value !== undefined) found[one.name] = value;
    }
    const fps = this.isVideo ? this.#value("fps") : undefined;
    if (fps !== undefined) found.fps = fps;
    const chosen = [...this.root.querySelectorAll('input[name="lora"]:checked')].map((box) => ({
      id: box.value, scale: Number(this.root.querySelector(`[data-scale="${CSS.escape(box.value)}"]`).value),
    }));
    if (chosen.length) found.lora = chosen;
    return found;
  }

  /** The requests that the form asks for: one for every prompt and seed. */
  requests() {
    this.clearErrors();
    const text = byId("f-prompt")?.value ?? "";
    const prompts = byId("f-lines")?.checked ? text.split("\n").filter((line) => line.trim()) : [text];
    const said = byId("f-seed").value.trim();
    const seeds = said ? said.split(/[\s,;]+/) : [undefined];
    if (!seeds.every((one) => one === undefined || /^\d+$/.test(one))) {
      this.showError({ param: "seed", message: "seeds are whole numbers, with commas between them" });
      return [];
    }
    let settings;
    try {
      settings = this.settings();
    } catch {
      this.showError({ param: "", message: "a list of numbers looks like [1, 0.5]" });
      return [];
    }
    const pictures = this.pictures ? this.pictures.urls() : { images: [], mask: null };
    const body = { model: this.entry.id, ...settings };
    let path = "v1/images/generations";
    if (this.isSound) {
      path = "v1/audio/generations";
      body.background_job = true;
    } else if (this.isVideo || this.isMesh) {
      path = this.isVideo ? "v1/videos" : "v1/meshes";
      if (pictures.images.length) body.input_reference = { image_url: pictures.images[0] };
    } else {
      Object.assign(body, { n: this.#value("n") ?? 1, background_job: true, partial_images: 3 });
      if (pictures.images.length) {
        path = "v1/images/edits";
        body.images = pictures.images.map((image_url) => ({ image_url }));
        if (pictures.mask) body.mask = { image_url: pictures.mask };
      }
    }
    return (prompts.length ? prompts : [""]).flatMap((prompt) => seeds.map((seed) => ({
      path, body: { ...body, ...(prompt || !this.isMesh ? { prompt } : {}), ...(seed === undefined ? {} : { seed: BigInt(seed) }) },
    })));
  }

  async draw() {
    const requests = this.requests();
    if (!requests.length) return;
    const button = this.root.querySelector("button[type=submit]");
    button.disabled = true;
    try {
      await this.onDraw(requests);
    } catch (error) {
      this.showError(error);
    } finally {
      button.disabled = false;
    }
  }

  clearErrors() {
    for (const node of this.root.querySelectorAll(".error")) node.textContent = "";
    for (const node of this.root.querySelectorAll("[aria-invalid]")) node.removeAttribute("aria-invalid");
  }

  /** Say what is wrong where it is wrong. */
  showError(error, isQuiet = false) {
    const also = { size: "width", images: "image", input_reference: "image", mask_image: "mask" };
    const name = also[error.param] || error.param || "";
    const place = byId(`e-${name}`) || byId("e-");
    place.textContent = error.message;
    const input = byId(`f-${name}`);
    if (!input) return;
    input.setAttribute("aria-invalid", "true");
    if (isQuiet) return;
    const folded = input.closest("details");
    if (folded) folded.open = true;
    input.focus();
  }

  /** Put settings into the form: those of a job, or of a file. */
  fill(settings) {
    if (Array.isArray(settings.prompt)) {
      settings = { ...settings, prompt: settings.prompt.join("\n") };
      if (byId("f-lines")) byId("f-lines").checked = true;
    }
    for (const [name, value] of Object.entries(settings)) {
      const input = byId(`f-${name}`);
      if (!input || name === "model" || name === "lora" || value === null) continue;
      input.value = Array.isArray(value) ? JSON.stringify(value) : String(value);
    }
    if (settings.lora) this.#fillAdapters(settings.lora);
  }

  /** The same, and whatever they do not say goes back to the model's own. */
  restore(settings) {
    this.clearErrors();
    for (const input of this.root.querySelectorAll("input[id^=f-], textarea, select")) {
      if (input.type === "checkbox") input.checked = false;
      else if (input.name !== "model") input.value = input.name === "n" ? 1 : "";
    }
    this.#fillAdapters([]);
    this.fill(settings);
    this.onChange();
  }

  #fillAdapters(chosen) {
    const scales = Object.fromEntries(chosen.map((one) => (Array.isArray(one) ? one : [one.id, one.scale])));
    const boxes = () => [...this.root.querySelectorAll('input[name="lora"]')];
    const listed = new Set(boxes().map((box) => box.value));
    for (const name of Object.keys(scales).filter((one) => !listed.has(one))) {
      byId("e-lora")?.before(this.#adapter(name)); // of one of two experts, or not here: the server says so
    }
    for (const box of boxes()) {
      box.checked = box.value in scales;
      if (box.checked) this.root.querySelector(`[data-scale="${CSS.escape(box.value)}"]`).value = scales[box.value];
    }
  }

  summary(requests) {
    const count = requests.reduce((sum, one) => sum + (one.body.n || 1), 0);
    return plural(count, this.isVideo ? "clip" : "picture");
  }
}
