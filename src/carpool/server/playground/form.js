// The form of a drawing, made from what `GET /v1/models` says of the model.

import { clearErrors, problems, showErrors } from "./checks.js";
import { byId, el, plural } from "./dom.js";
import { adapterField, anyField, field, seedField, sizeFields, slider, title } from "./fields.js";
import { Pictures } from "./pictures.js";

const PLACED = new Set(["prompt", "negative_prompt", "width", "height", "num_inference_steps", "guidance_scale", "num_frames",
  "strength", "image", "mask", "input_reference", "seed", "n"]);
const DRAFT = "carpool-draft"; // in the session: it outlives a reload, and no tab

const EXAMPLES = {
  shapes: ["a red circle on a blue background", "a yellow star on a black background", "a green ring on a white background"],
  "shapes-video": ["a red circle moving right on a black background", "a blue square moving up on a white background"],
};
const ANY = ["a lighthouse on a cliff at dusk", "a fox in the snow, photograph", "a bowl of oranges, oil painting"];
const ANY_TEXTS = ["a haiku about a lighthouse", "three names for a grey cat"];
const ANY_CLIPS = ["waves breaking on a rocky shore", "a paper boat drifting down a stream"];

export class Form {
  /**
   * @param root the form's element
   * @param onDraw is given a list of requests: {path, body}
   * @param onChange is called after every change
   */
  constructor(root, onDraw, onChange) {
    Object.assign(this, { root, onDraw, onChange, entry: null, parameters: {}, lastSeed: undefined });
    root.addEventListener("submit", (event) => { event.preventDefault(); this.draw(); });
    root.addEventListener("input", () => { this.changed(); onChange(); });
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
      const text = el("textarea", { rows: 3, placeholder: `${this.isText ? "What shall it answer?" : "What shall it show?"} Such as: ${this.examples[0]}`, spellcheck: true });
      const lines = el("label.inline.muted", {}, el("input", { type: "checkbox", id: "f-lines" }), "each line is a prompt of its own");
      parts.push(el("div", {}, field("prompt", text, this.isText ? "Message" : "Prompt"), lines), ...(this.isText ? [] : [this.#negative(has("negative_prompt"))]));
    }
    this.pictures = null;
    if (limits.pictures) {
      this.pictures = new Pictures(limits.pictures, has("mask"), () => { this.taskChanged(); this.onChange(); });
      parts.push(el("div", { "data-field": "image" }, this.pictures.node, el("p.error", { id: "e-image", role: "alert" }), el("p.error", { id: "e-mask", role: "alert" })));
    }
    if (has("width") && has("height")) parts.push(sizeFields(entry, (sides) => { this.fill(sides); this.onChange(); }));
    parts.push(...slider("num_inference_steps", this.parameters, limits), ...slider("guidance_scale", this.parameters, limits));
    if (this.isVideo) {
      parts.push(...slider("num_frames", this.parameters, limits));
      if (has("num_frames")) parts.push(field("fps", el("input", { type: "number", min: 1, max: 240, step: "any", placeholder: "the model's own" })));
    }
    parts.push(...slider("strength", this.parameters, limits), seedField(() => this.lastSeed, () => this.onChange()));
    if (this.isOfPictures) parts.push(field("n", el("input", { type: "number", min: 1, max: limits.n || 10, step: 1, value: 1 })));
    if (entry.lora.length) parts.push(this.#adapters(entry.lora));
    const rest = entry.parameters.filter((one) => !PLACED.has(one.name) && one.kind !== "picture");
    if (rest.length) {
      parts.push(el("details", {}, el("summary", {}, `More settings (${rest.length})`),
        el("div.fields", {}, rest.map((one) => anyField(one, entry.schedulers)))));
    }
    this.root.replaceChildren(el("div.scrolling", { tabIndex: -1 }, parts), el("div.draw-row", {},
      el("p.error", { id: "e-", role: "alert" }),
      el("button.primary", { type: "submit", title: "Ctrl+Enter" }, this.isVideo ? "Make the clip" : this.isMesh ? "Make the mesh" : this.isSound ? "Make the sound" : this.isText ? "Write" : "Draw"),
      el("button.quiet.to-form", { type: "button", onclick: () => byId("f-prompt")?.focus() }, "Prompt"),
      el("p.muted", { id: "estimate", role: "status" })));
    this.taskChanged();
  }

  /** The negative prompt, greyed with the reason where it does nothing. */
  #negative(isTaken) {
    const text = el("textarea", { rows: 1, spellcheck: true });
    const node = field("negative_prompt", text);
    if (isTaken) { text.placeholder = "what it must not show"; } else {
      text.disabled = true;
      text.placeholder = "this model reads none";
    }
    node.append(el("p.muted", { id: "negative-why", hidden: true }));
    return node;
  }

  /** Grey the negative prompt where the present guidance leaves it without effect. */
  #guidanceChanged() {
    const name = ["true_cfg_scale", "guidance_scale"].find((one) => one in this.parameters);
    const text = byId("f-negative_prompt"), why = byId("negative-why");
    if (!text || !name || !("negative_prompt" in this.parameters)) return;
    const guidance = Number(byId(`f-${name}`)?.value || this.parameters[name].default || 0);
    const isIdle = this.parameters[name].default !== null && guidance <= 1;
    if (text.disabled === isIdle) return;
    text.disabled = isIdle;
    why.hidden = !isIdle;
    why.replaceChildren(`Does nothing while ${title(name)} is ${guidance}. `, el("button.link", { type: "button", onclick: () => {
      this.fill({ [name]: 4 });
      this.onChange();
      text.focus();
    } }, `Set ${title(name)} to 4`));
  }

  /** Prompts for a stranger to begin with. */
  get examples() { return EXAMPLES[this.entry.id] || (this.isVideo ? ANY_CLIPS : this.isText ? ANY_TEXTS : ANY); }

  get isVideo() { return this.entry.tasks[0].endsWith("-video"); }

  get isMesh() { return this.entry.tasks[0].endsWith("-mesh"); }

  get isSound() { return this.entry.tasks[0].endsWith("-audio"); }

  get isText() { return this.entry.tasks[0].startsWith("text-generation"); }

  get isOfPictures() { return !this.isVideo && !this.isMesh && !this.isSound && !this.isText; }

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
    this.#guidanceChanged();
  }

  #adapters(names) {
    return el("fieldset", { "data-field": "lora" }, el("legend.label", {}, "Adapters"),
      names.map((name) => adapterField(name)), el("p.error", { id: "e-lora", role: "alert" }));
  }

  /** What a field says, in the type of its parameter; undefined where it says nothing. */
  #value(name) {
    const input = byId(`f-${name}`);
    if (!input || input.closest("[hidden]") || input.disabled || input.value.trim() === "") return undefined;
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

  /** What is wrong with the form, as far as that is seen without the server. */
  problems() { return problems(this.root, this.parameters); }

  /** The requests that the form asks for: one for every prompt and seed. */
  requests() {
    const text = byId("f-prompt")?.value ?? "";
    const prompts = byId("f-lines")?.checked ? text.split("\n").filter((line) => line.trim()) : [text];
    const typed = byId("f-seed").value.trim();
    const seeds = typed ? typed.split(/[\s,;]+/) : [undefined];
    const settings = this.settings();
    const pictures = this.pictures ? this.pictures.urls() : { images: [], mask: null };
    const body = { model: this.entry.id, ...settings };
    let path = "v1/images/generations";
    if (this.isText) {
      const shown = pictures.images.map((url) => ({ type: "image_url", image_url: { url } }));
      return prompts.flatMap((prompt) => seeds.map((seed) => ({
        path: "v1/chat/completions", title: prompt,
        body: { ...body, messages: [{ role: "user", content: [...shown, { type: "text", text: prompt }] }], ...(seed === undefined ? {} : { seed: BigInt(seed) }) },
      })));
    }
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
    const wrong = this.problems();
    if (wrong.length) { this.showErrors(wrong); return; }
    clearErrors(this.root);
    const requests = this.requests();
    const button = this.root.querySelector("button[type=submit]");
    button.disabled = true;
    try {
      await this.onDraw(requests);
    } catch (error) {
      this.showErrors(error.all || [error]);
    } finally {
      button.disabled = false;
    }
  }

  showErrors(errors, isQuiet = false) { showErrors(this.root, errors, isQuiet); }

  /** What was typed and chosen, to be put back as it is. */
  snapshot() {
    const inputs = [...this.root.querySelectorAll("[id^=f-]:not([type=file])")].filter((input) => input.name !== "model");
    return {
      model: this.entry.id, values: Object.fromEntries(inputs.map((input) => [input.id, input.type === "checkbox" ? input.checked : input.value])),
      lora: this.settings().lora || [], pictures: this.pictures?.items || [],
    };
  }

  bringBack({ model, values, lora, pictures }) {
    if (model !== this.entry?.id) return;
    for (const [id, value] of Object.entries(values)) {
      const input = byId(id);
      if (input?.type === "checkbox") input.checked = value;
      else if (input) input.value = value;
    }
    this.#fillAdapters(lora);
    this.pictures?.replace(pictures || []);
    this.#followed();
    this.onChange();
  }

  keepDraft() {
    const draft = this.snapshot();
    for (const kept of [draft, { ...draft, pictures: [] }]) {
      try { sessionStorage.setItem(DRAFT, JSON.stringify(kept)); return; } catch { /* pictures are too large for it */ }
    }
  }

  /** The draft of this tab, if there is one. */
  static draft() {
    try { return JSON.parse(sessionStorage.getItem(DRAFT)); } catch { return null; }
  }

  /** Sliders, lock and greyed fields follow what stands in the fields. */
  #followed() {
    for (const input of this.root.querySelectorAll("[id^=f-]")) input.follow?.();
    this.changed();
  }

  /** Is called after every change. */
  changed() { this.#guidanceChanged(); }

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
    this.#followed();
  }

  /** The same, and whatever they do not say goes back to the model's own. */
  restore(settings) {
    clearErrors(this.root);
    for (const input of this.root.querySelectorAll("input[id^=f-], textarea, select")) {
      if (input.type === "checkbox") input.checked = false;
      else if (input.name !== "model") input.value = input.name === "n" ? 1 : "";
    }
    this.#fillAdapters([]);
    this.fill(settings);
    clearErrors(this.root);
    this.onChange();
  }

  #fillAdapters(chosen) {
    const scales = Object.fromEntries(chosen.map((one) => (Array.isArray(one) ? one : [one.id, one.scale])));
    const boxes = () => [...this.root.querySelectorAll('input[name="lora"]')];
    const listed = new Set(boxes().map((box) => box.value));
    for (const name of Object.keys(scales).filter((one) => !listed.has(one))) {
      byId("e-lora")?.before(adapterField(name)); // of one of two experts, or not here: the server says so
    }
    for (const box of boxes()) {
      box.checked = box.value in scales;
      if (box.checked) this.root.querySelector(`[data-scale="${CSS.escape(box.value)}"]`).value = scales[box.value];
    }
  }

  summary(requests) {
    const count = requests.reduce((sum, one) => sum + (one.body.n || 1), 0);
    return plural(count, this.isVideo ? "clip" : this.isText ? "text" : "picture");
  }
}
