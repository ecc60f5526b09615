// A job as a card, and in full as a dialog.

import { isMeshFile, isSoundFile, meshView, soundView } from "./artifacts.js";
import { el, plural, seconds } from "./dom.js";
import { isOpen, isVideoFile, leftS } from "./jobs.js";

const WORDS = { queued: "waiting", in_progress: "drawing", completed: "done", failed: "failed", cancelled: "cancelled", expired: "out of time" };
const promptOf = (job) => [job.settings?.prompt || []].flat().join(" / ") || (job.task || "").replaceAll("-", " ");

export class Card {
  /** @param act is called with the name of an action and the job */
  constructor(job, jobs, act) {
    Object.assign(this, { job, jobs, act, shown: "" });
    this.shots = el("div.shots");
    this.progress = el("progress", { max: 100, value: 0, "aria-label": "Progress" });
    this.prompt = el("p.prompt");
    this.line = el("p.muted");
    this.shared = el("p.shared");
    this.warned = el("p.warned", { role: "note" });
    this.actions = el("div.row");
    this.node = el("article.card", { "data-job": job.id }, this.shots, this.progress, el("div.text", {}, this.prompt, this.line, this.warned, this.shared, this.actions));
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
    this.progress.hidden = !isOpen(job);
    this.progress.value = job.steps ? 100 * job.step / job.steps : job.progress;
    this.line.textContent = this.#line();
    this.warned.textContent = (job.warnings || []).join(" · ");
    const state = `${job.status} ${job.files.length}`;
    if (state !== this.shown) { this.shown = state; this.#actions(); this.#files(); }
    if (isOpen(job)) this.#previews();
  }

  #line() {
    const { job } = this;
    if (job.status === "failed" || job.status === "expired") return job.error?.message || WORDS[job.status];
    if (job.status === "in_progress") {
      const left = leftS(job);
      const pace = job.steps ? `step ${job.step} of ${job.steps}` : "drawing";
      return left === null ? pace : `${pace}, ${seconds(left)} left`;
    }
    if (job.status === "queued") return job.queue_position ? `waiting behind ${job.queue_position}` : "waiting";
    if (job.status !== "completed") return WORDS[job.status];
    const steps = job.settings.num_inference_steps;
    return [`seed ${job.seeds.join(", ")}`, steps && plural(steps, "step")].filter(Boolean).join(" · ");
  }

  #actions() {
    const { job } = this;
    const button = (name, text, label) => el("button.chip", { onclick: () => this.act(name, job), "aria-label": `${label || text}: ${promptOf(job)}` }, text);
    if (isOpen(job)) this.actions.replaceChildren(button("cancel", "Cancel"));
    else if (isMeshFile(job.files[0]?.name || "") || isSoundFile(job.files[0]?.name || "")) this.actions.replaceChildren(button("open", "Open"), button("restore", "Use settings"), button("remove", "Delete"));
    else this.actions.replaceChildren(button("restore", "Use settings"), ...(job.status === "completed" ? [button("vary", "Vary", "Four more with new seeds")] : []), button("remove", "Delete"));
  }

  #previews() {
    const parts = Math.max(1, job_parts(this.job));
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
    const names = job.files.map((one) => one.name).filter((name) => job.kind !== "video" || isVideoFile(name));
    if (!names.length) {
      this.shots.replaceChildren(el("div.shot.blank.still", { "aria-hidden": "true" }, WORDS[job.status]));
      return;
    }
    if (isMeshFile(names[0]) || isSoundFile(names[0])) {
      this.shots.replaceChildren(await artifact(job, names[0], this.jobs));
      this.#tellShared();
      return;
    }
    const urls = await Promise.all(names.map((name) => this.jobs.file(job, name)));
    this.shots.style.setProperty("--columns", Math.ceil(Math.sqrt(names.length)));
    this.shots.replaceChildren(el("button.card-open", { onclick: () => this.act("open", job), "aria-label": `Open: ${promptOf(job)}` },
      media(urls[0], names[0], promptOf(job))), ...urls.slice(1).map((url, i) => el("button.card-open", { onclick: () => this.act("open", job), "aria-label": `Open picture ${i + 2}: ${promptOf(job)}` }, media(url, names[i + 1], promptOf(job)))));
    this.#tellShared();
  }

  /** How many others shared its forwards, while the server remembers. */
  async #tellShared() {
    const { job } = this;
    if (job.status !== "completed" || !job.mine) return;
    try {
      job.report ??= await this.jobs.report(job.id);
      const denoise = job.report.outputs.flatMap((one) => one.phases).filter((phase) => phase.phase === "denoise");
      const most = Math.max(0, ...denoise.map((phase) => phase.others_most));
      const total = Math.max(...job.report.outputs.map((one) => one.total_s));
      this.line.textContent = `${this.#line()} · ${seconds(total)}`;
      this.shared.textContent = most ? `shared forwards with ${plural(most, "other")}` : "";
    } catch { /* it is not remembered any more */ }
  }
}

const job_parts = (job) => job.parts || job.seeds?.length || 1;

function media(url, name, text) {
  if (url === null) return el("div.shot.blank.still");
  if (isVideoFile(name)) return el("video.shot", { src: url, muted: true, loop: true, autoplay: !matchMedia("(prefers-reduced-motion: reduce)").matches, playsInline: true, "aria-label": text });
  return el("img.shot", { src: url, alt: text });
}

async function artifact(job, name, jobs) {
  const content = await jobs.content(job, name).catch(() => null);
  if (content === null) return el("div.shot.blank.still");
  const url = await (job.urls[name] ??= Promise.resolve(URL.createObjectURL(content)));
  return isMeshFile(name) ? meshView(content, name, promptOf(job)) : soundView(content, name, url, promptOf(job));
}

/** Show a job in full. */
export async function showDetail(dialog, job, jobs, act) {
  const close = el("button.quiet", { onclick: () => dialog.close() }, "Close");
  const pictures = el("div.pictures");
  const side = el("div.side", {}, el("h2", { id: "detail-title" }, promptOf(job)));
  dialog.replaceChildren(el("div.row.end", {}, close), el("div.detail", {}, pictures, side));
  dialog.showModal();
  const names = job.files.map((one) => one.name).filter((name) => job.kind !== "video" || isVideoFile(name));
  for (const name of names) {
    const url = await jobs.file(job, name);
    const download = el("a", { href: url, download: `${job.id}-${name}` }, `Download ${name}`);
    const isPicture = !isVideoFile(name) && !isMeshFile(name) && !isSoundFile(name);
    const node = isMeshFile(name) || isSoundFile(name) ? await artifact(job, name, jobs) : isVideoFile(name) ? el("video", { src: url, controls: true, loop: true, autoplay: true, muted: false, "aria-label": promptOf(job) }) : el("img", { src: url, alt: promptOf(job) });
    const line = el("div.row", {}, download);
    if (isPicture) line.append(el("button.chip", { onclick: () => { dialog.close(); act("input", job, name); } }, "Draw with it"));
    pictures.append(node, line);
  }
  const button = (name, text) => el("button", { onclick: () => { dialog.close(); act(name, job); } }, text);
  side.append(el("div.row", {}, button("restore", "Use settings"), job.status === "completed" && button("vary", "Variations"), button("remove", "Delete")));
  const rows = Object.entries({ ...job.settings, seeds: job.seeds.join(", "), model: job.model, task: job.task })
    .filter(([name, value]) => value !== null && !["seed", "prompt", "n"].includes(name))
    .map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, typeof value === "object" ? JSON.stringify(value) : String(value))));
  const timings = el("div");
  if (job.warnings) side.append(el("p.warned", { role: "note" }, job.warnings.join(" · ")));
  side.append(timings, el("table", {}, el("tbody", {}, rows)));
  try {
    const report = await jobs.report(job.id);
    timings.replaceChildren(...report.outputs.map((output) => timeline(output, jobs)));
  } catch {
    timings.replaceChildren(el("p.muted", {}, "The server does not remember its timings any more."));
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
  let told = "It had every forward for itself.";
  if (denoise?.others.length) {
    const names = denoise.others.map((id) => (id === "another" ? "another client's request" : `“${jobs.known.get(id)?.settings?.prompt || id}”`));
    told = `Shared ${plural(denoise.forwards, "denoising forward")} with ${denoise.others_mean.toFixed(1)} others on average (at most ${denoise.others_most}): ${[...new Set(names)].join(", ")}.`;
  }
  return el("div", {}, bar, legend, el("p.muted", {}, told));
}
