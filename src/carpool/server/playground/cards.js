// A job as a card: large on the stage, smaller in the gallery.

import { duration, el, plural } from "./dom.js";
import { isOpen, leftS } from "./jobs.js";
import { WORDS, artifact, filesOf, isArtifact, media, partsOf, promptOf, sharedText } from "./media.js";
import { menu } from "./menu.js";

export class Card {
  /**
   * @param act is called with the name of an action, the job, and a file or a part
   * @param actions gives the entries of the job's menu
   */
  constructor(job, jobs, act, actions) {
    Object.assign(this, { job, jobs, act, shown: "", wasOpen: false });
    this.shots = el("div.shots");
    this.progress = el("progress", { max: 100, value: 0, "aria-label": "Progress" });
    this.prompt = el("p.prompt");
    this.line = el("p.muted");
    this.written = el("p.prompt.written", { hidden: true, title: "The prompt as a language model wrote it anew" });
    this.shared = el("p.shared");
    this.warned = el("p.warned", { role: "note" });
    this.cancel = el("button.cancel", { type: "button", onclick: () => act("cancel", job), "aria-label": `Cancel: ${promptOf(job)}` }, "Cancel");
    this.star = el("button.icon.star", { type: "button", onclick: () => act("favour", job) });
    this.node = el("article.card", { "data-job": job.id, "aria-label": promptOf(job) }, this.shots, this.progress, el("div.text", {}, this.prompt, this.written, this.line, this.warned, this.shared,
      el("div.row.actions", {}, menu("Actions", `Actions: ${promptOf(job)}`, () => actions(job)), this.star, el("span.grow"), this.cancel)));
    this.update();
  }

  update() {
    const { job } = this;
    const { width, height } = job.settings || {};
    this.node.style.setProperty("--aspect", width && height ? `${width} / ${height}` : "1");
    this.node.classList.toggle("failed", Boolean(job.error) && job.status === "failed");
    this.node.dataset.status = job.status;
    this.prompt.textContent = promptOf(job);
    this.prompt.title = promptOf(job);
    const written = job.revised_prompt || Object.values(job.written || {})[0];
    this.written.hidden = !written;
    this.written.textContent = written ? `→ ${written}` : "";
    this.progress.hidden = !isOpen(job);
    this.progress.value = job.steps ? 100 * job.step / job.steps : job.progress;
    this.line.textContent = this.#line();
    this.warned.textContent = (job.warnings || []).join(" · ");
    this.wasOpen ||= isOpen(job);
    this.cancel.hidden = !this.wasOpen;
    this.cancel.classList.toggle("gone", !isOpen(job)); // its place stays empty
    this.star.textContent = job.isFavourite ? "★" : "☆";
    this.star.setAttribute("aria-pressed", Boolean(job.isFavourite));
    this.star.setAttribute("aria-label", `Favourite: ${promptOf(job)}`);
    const state = `${job.status} ${job.files.length}`;
    if (state !== this.shown) { this.shown = state; this.#files(); }
    if (isOpen(job)) this.#previews();
  }

  #line() {
    const { job } = this;
    if (job.status === "failed" || job.status === "expired") return job.error?.message || WORDS[job.status];
    if (job.status === "in_progress") {
      const left = leftS(job);
      const pace = job.steps ? `step ${job.step} of ${job.steps}` : job.written ? "writing the prompt" : "drawing";
      if (left === null) return pace;
      return left < 1 ? `${pace}, nearly done` : `${pace}, ${duration(left)} left`;
    }
    if (job.status === "queued") return job.queue_position ? `waiting behind ${job.queue_position}` : "waiting";
    if (job.status !== "completed") return WORDS[job.status];
    const steps = job.settings.num_inference_steps;
    return [`seed ${job.seeds.join(", ")}`, steps && plural(steps, "step")].filter(Boolean).join(" · ");
  }

  #previews() {
    const parts = partsOf(this.job);
    this.shots.style.setProperty("--columns", Math.ceil(Math.sqrt(parts)));
    if (this.shots.childElementCount !== parts) {
      this.shots.replaceChildren(...Array.from({ length: parts }, () => el("div.shot.blank", { "aria-hidden": "true" })));
    }
    [...this.shots.children].forEach((node, part) => {
      const url = this.job.previews[part];
      if (!url) return;
      if (node.tagName === "IMG") node.src = url;
      else node.replaceWith(el("img.shot.preview", { src: url, alt: "A preview" }));
    });
  }

  async #files() {
    const { job } = this;
    if (isOpen(job)) return;
    const names = filesOf(job), text = promptOf(job);
    if (!names.length) {
      this.shots.replaceChildren(el("div.shot.blank.still", { "aria-hidden": "true" }, WORDS[job.status]));
      return;
    }
    if (isArtifact(names[0])) this.shots.replaceChildren(await artifact(job, names[0], this.jobs));
    else {
      const urls = await Promise.all(names.map((name) => this.jobs.file(job, name)));
      this.shots.style.setProperty("--columns", Math.ceil(Math.sqrt(names.length)));
      this.shots.replaceChildren(...urls.map((url, i) => el("button.card-open", { type: "button", onclick: () => this.act("open", job, names[i]),
        "aria-label": i ? `Open picture ${i + 1}: ${text}` : `Open: ${text}` }, media(url, names[i], text))));
    }
    this.#tellShared();
  }

  /** How many steps others shared, while the server remembers. */
  async #tellShared() {
    const { job } = this;
    if (job.status !== "completed" || !job.mine) return;
    try {
      job.report ??= await this.jobs.report(job.id);
      this.line.textContent = `${this.#line()} · ${duration(Math.max(...job.report.outputs.map((output) => output.total_s)))}`;
      this.shared.textContent = sharedText(job.report);
    } catch { /* it is not remembered any more */ }
  }
}
