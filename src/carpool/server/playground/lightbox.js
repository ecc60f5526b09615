// A drawing in full: zoom, the one before and the next by arrow keys, two compared, and all that is known of it.

import { duration, el, plural, seconds } from "./dom.js";
import { title } from "./fields.js";
import { isVideoFile } from "./jobs.js";
import { artifact, download, filesOf, isArtifact, isPicture, promptOf } from "./media.js";

const MOST_ZOOM = 32;

export class LightBox {
  /**
   * @param order gives the jobs that arrow keys go through
   * @param act is called with the name of an action, the job, and the file's name
   */
  constructor(dialog, jobs, order, act) {
    Object.assign(this, { dialog, jobs, order, act, job: null, name: "", pinned: null });
    dialog.addEventListener("keydown", (event) => this.#key(event));
    dialog.addEventListener("close", () => { this.job = null; this.pinned = null; });
  }

  get isOpen() { return this.dialog.open; }

  /** All pictures and clips that arrows go through. */
  get #all() {
    return this.order().flatMap((job) => filesOf(job).map((name) => [job, name]));
  }

  async open(job, name = filesOf(job)[0]) {
    Object.assign(this, { job, name, zoom: 1, at: [0, 0] });
    const close = el("button.quiet", { type: "button", onclick: () => this.dialog.close() }, "Close");
    const step = (by, text, label) => el("button.quiet.icon", { type: "button", "aria-label": label, onclick: () => this.#go(by) }, text);
    this.view = el("div.view-box");
    this.tools = el("div.row.tools", {}, step(-1, "←", "The one before"), step(1, "→", "The next one"), ...this.#zoomTools(), el("span.grow"), close);
    const side = this.#side(job, name);
    const had = this.dialog.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    this.dialog.replaceChildren(this.tools, el("div.detail", {}, this.view, side));
    if (!this.dialog.open) this.dialog.showModal();
    (had && [...this.tools.querySelectorAll("button")].find((node) => node.getAttribute("aria-label") === had) || close).focus();
    await this.#showFile(job, name);
  }

  /** Two drawings, one over the other. */
  async compare(first, second) {
    this.pinned = first;
    await this.open(...second);
  }

  async #showFile(job, name) {
    if (!name) { this.view.replaceChildren(el("p.muted", {}, job.error?.message || job.status)); return; }
    const url = isArtifact(name) ? null : await this.jobs.file(job, name);
    if (this.job !== job || this.name !== name) return;
    if (isArtifact(name)) { this.view.replaceChildren(await artifact(job, name, this.jobs)); return; }
    if (isVideoFile(name)) { this.view.replaceChildren(el("video", { src: url, controls: true, loop: true, autoplay: true, muted: false, "aria-label": promptOf(job) })); return; }
    const picture = el("img", { src: url, alt: promptOf(job), draggable: false });
    const layers = el("div.layers", {}, picture);
    if (this.pinned) await this.#split(layers);
    this.layers = layers;
    this.view.replaceChildren(layers, ...(this.pinned ? [this.slider] : []));
    this.#pan(this.view);
  }

  async #split(layers) {
    const [job, name] = this.pinned;
    const under = el("img.under", { src: await this.jobs.file(job, name), alt: `Compared with: ${promptOf(job)}`, draggable: false });
    layers.append(under, el("b.mark.a", { "aria-hidden": "true" }, "A"), el("b.mark.b", { "aria-hidden": "true" }, "B"));
    this.slider = el("input", { type: "range", min: 0, max: 100, value: 50, "aria-label": "How much of A is shown, beside B" });
    const follow = () => layers.style.setProperty("--split", `${this.slider.value}%`);
    this.slider.addEventListener("input", follow);
    follow();
  }

  #zoomTools() {
    if (!this.name || !isPicture(this.name)) return [];
    const button = (text, label, run) => el("button.quiet.icon", { type: "button", "aria-label": label, title: label, onclick: run }, text);
    const isPinned = Boolean(this.pinned);
    const compare = el("button.quiet", { type: "button", "aria-pressed": isPinned, title: "Keep this one as A; arrows choose B", onclick: () => {
      this.pinned = this.pinned ? null : [this.job, this.name];
      this.open(this.job, this.name);
    }, "aria-label": "Compare A and B" }, "A/B");
    this.level = el("span.muted", { role: "status" }, "fitted");
    return [button("−", "Smaller", () => this.#zoomBy(1 / 1.5)), button("+", "Larger", () => this.#zoomBy(1.5)), button("1:1", "Full size", () => this.#fullSize()),
      button("⤢", "Fit", () => this.#zoomTo(1)), this.level, compare];
  }

  #fullSize() {
    const picture = this.layers?.firstElementChild;
    if (picture) this.#zoomTo(picture.naturalWidth / (picture.offsetWidth || 1));
  }

  #zoomBy(factor) { this.#zoomTo(this.zoom * factor); }

  #zoomTo(zoom) {
    this.zoom = Math.max(0.05, Math.min(MOST_ZOOM, zoom));
    if (this.zoom === 1) this.at = [0, 0];
    this.#move();
    this.level.textContent = this.zoom === 1 ? "fitted" : `${Math.round(100 * this.zoom)} % of fitted`;
  }

  #move() { if (this.layers) this.layers.style.transform = `translate(${this.at[0]}px, ${this.at[1]}px) scale(${this.zoom})`; }

  #pan(view) {
    const fingers = new Map();
    const apart = () => { const [a, b] = [...fingers.values()]; return Math.hypot(a[0] - b[0], a[1] - b[1]); };
    view.onwheel = (event) => { event.preventDefault(); this.#zoomBy(Math.exp(-event.deltaY / 400)); };
    view.ondblclick = () => (this.zoom === 1 ? this.#fullSize() : this.#zoomTo(1));
    view.onpointerdown = (event) => { if (event.target.tagName !== "INPUT") { fingers.set(event.pointerId, [event.clientX, event.clientY]); view.setPointerCapture(event.pointerId); } };
    view.onpointerup = view.onpointercancel = (event) => fingers.delete(event.pointerId);
    view.onpointermove = (event) => {
      const before = fingers.get(event.pointerId);
      if (!before) return;
      const was = fingers.size === 2 ? apart() : 0;
      fingers.set(event.pointerId, [event.clientX, event.clientY]);
      if (fingers.size === 2) this.#zoomBy(apart() / (was || 1));
      else { this.at = [this.at[0] + event.clientX - before[0], this.at[1] + event.clientY - before[1]]; this.#move(); }
    };
  }

  #go(by) {
    const all = this.#all, at = all.findIndex(([job, name]) => job === this.job && name === this.name);
    const next = all[at + by];
    if (next) this.open(...next);
  }

  #key(event) {
    if (["INPUT", "VIDEO", "AUDIO"].includes(event.target.tagName) || event.target.getAttribute("role") === "menuitem" || event.target.className === "mesh") return;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) { event.preventDefault(); this.#go(by); }
    if (!this.level || !isPicture(this.name || "")) return;
    if (event.key === "+" || event.key === "=") this.#zoomBy(1.5);
    if (event.key === "-") this.#zoomBy(1 / 1.5);
    if (event.key === "0") this.#zoomTo(1);
    if (event.key === "1") this.#fullSize();
  }

  /** What is known of a job, and what can be done with it. */
  #side(job, name) {
    const act = (what) => { this.dialog.close(); this.act(what, job, name); };
    const button = (what, text) => el("button", { type: "button", onclick: () => act(what) }, text);
    const rows = Object.entries({ ...job.settings, seeds: job.seeds.join(", "), model: job.model, task: job.task })
      .filter(([key, value]) => value !== null && !["seed", "prompt", "n"].includes(key))
      .map(([key, value]) => el("tr", {}, el("th", { scope: "row" }, title(key)), el("td", {}, typeof value === "object" ? JSON.stringify(value) : String(value))));
    const timings = el("div");
    const side = el("div.side", { tabIndex: 0, role: "region", "aria-label": "Its settings" }, el("h2", { id: "detail-title" }, promptOf(job)), el("div.row", {},
      name && el("button", { type: "button", onclick: () => download(job, name, this.jobs) }, "Download"),
      button("restore", "Use settings"), job.status === "completed" && button("vary", "Variations"),
      name && isPicture(name) && button("input", "Draw with it"), button("remove", "Delete")),
    job.warnings && el("p.warned", { role: "note" }, job.warnings.join(" · ")), timings, el("table", {}, el("tbody", {}, rows)));
    this.jobs.report(job.id).then((report) => { timings.replaceChildren(...report.outputs.map((output) => timeline(output, this.jobs))); })
      .catch(() => { timings.replaceChildren(el("p.muted", {}, "The server does not remember its timings any more.")); });
    return side;
  }
}

function timeline(output, jobs) {
  const total = output.total_s || 1;
  const parts = [["waiting", output.queued_s], ...output.phases.map((phase) => [phase.phase, phase.duration_s])];
  const bar = el("div.phases", { role: "img", "aria-label": parts.map(([name, s]) => `${name} ${seconds(s)}`).join(", ") });
  for (const [name, s] of parts) {
    const part = el(`i.${name}`, { title: `${name} ${seconds(s)}` });
    part.style.width = `${100 * s / total}%`;
    bar.append(part);
  }
  const legend = el("p.legend", {}, parts.map(([name, s]) => el("span", {}, el(`i.${name}`), `${name} ${seconds(s)}`)));
  const denoise = output.phases.find((phase) => phase.phase === "denoise");
  let text = `It took ${duration(total)}, and had every step for itself.`;
  if (denoise?.others.length) {
    const names = denoise.others.map((id) => (id === "another" ? "another client's request" : `“${jobs.known.get(id)?.settings?.prompt || id}”`));
    const steps = Math.round(output.steps * denoise.shared_forwards / denoise.forwards);
    text = `It took ${duration(total)}. ${steps} of its ${plural(output.steps, "step")} shared with ${plural(denoise.others_most, "other")} at most: ${[...new Set(names)].join(", ")}.`;
  }
  return el("div", {}, bar, legend, el("p.muted", {}, text));
}
