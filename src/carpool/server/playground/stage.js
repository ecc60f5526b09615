// The stage: one drawing large, and a film strip of the newest below it.

import { announce, byId, el } from "./dom.js";
import { Card } from "./cards.js";
import { isOpen } from "./jobs.js";
import { WORDS, filesOf, isArtifact, media, partsOf, promptOf } from "./media.js";

const MOST = 24; // drawings in the strip

export class Stage {
  constructor(jobs, act, actions) {
    Object.assign(this, { jobs, act, actions, items: new Map(), card: null });
    this.film = byId("results");
    this.film.addEventListener("keydown", (event) => {
      const ids = [...this.items.keys()].reverse(), at = ids.indexOf(this.card?.job.id);
      const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: ids.length - 1 }[event.key];
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); byId("current").querySelector(".card-open")?.click(); }
      if (next === undefined) return;
      event.preventDefault();
      this.show(ids[Math.max(0, Math.min(ids.length - 1, next))], true);
    });
  }

  has(id) { return this.items.has(id); }

  /** Jobs of the strip, the newest first. */
  get order() { return [...this.items.keys()].reverse().map((id) => this.jobs.known.get(id)).filter(Boolean); }

  /** Put a job at the head of the strip; `isShown` puts it on the stage as well. */
  add(job, isShown = true) {
    if (this.has(job.id)) return;
    const node = el("div.frame", { role: "option", tabIndex: -1, "data-job": job.id, onclick: () => this.show(job.id) });
    this.items.set(job.id, node);
    this.film.prepend(node);
    this.#frame(job);
    while (this.items.size > MOST) this.remove(this.items.keys().next().value);
    if (isShown || !this.card) this.show(job.id);
    this.#emptied();
  }

  /** Show a job large. */
  show(id, hasFocus = false) {
    const job = this.jobs.known.get(id);
    if (!job) return;
    if (this.card?.job.id !== id) {
      this.card = new Card(job, this.jobs, this.act, this.actions);
      byId("current").replaceChildren(this.card.node);
    }
    for (const [other, node] of this.items) {
      node.setAttribute("aria-selected", other === id);
      node.tabIndex = other === id ? 0 : -1;
    }
    const node = this.items.get(id);
    if (hasFocus) node?.focus();
    node?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  update(job) {
    if (!this.has(job.id)) return;
    this.#frame(job);
    if (this.card?.job.id === job.id) this.card.update();
  }

  /** Take a job off; the one beside it takes its place. */
  remove(id) {
    const node = this.items.get(id);
    if (!node) return;
    const beside = (node.previousElementSibling || node.nextElementSibling)?.dataset.job;
    node.remove();
    this.items.delete(id);
    if (this.card?.job.id === id) {
      this.card = null;
      byId("current").replaceChildren();
      if (beside) this.show(beside);
    }
    this.#emptied();
  }

  #emptied() {
    byId("empty").hidden = this.items.size > 0;
    this.film.hidden = this.items.size < 1;
  }

  async #frame(job) {
    const node = this.items.get(job.id), state = isOpen(job) ? `${job.status} ${Object.keys(job.previews).length}` : `${job.status} ${job.files.length}`;
    if (node.dataset.status && node.dataset.status !== job.status && !isOpen(job)) announce(`${promptOf(job)}: ${WORDS[job.status]}`);
    node.dataset.status = job.status;
    node.title = promptOf(job);
    node.setAttribute("aria-label", `${promptOf(job)}, ${WORDS[job.status]}${partsOf(job) > 1 ? `, ${partsOf(job)} pictures` : ""}`);
    node.style.setProperty("--done", `${isOpen(job) ? (job.steps ? 100 * job.step / job.steps : job.progress) : 100}%`);
    if (isOpen(job)) {
      const url = job.previews[0];
      if (url && node.firstElementChild?.tagName === "IMG") node.firstElementChild.src = url;
      else if (url) node.replaceChildren(el("img.shot", { src: url, alt: "" }));
      else node.replaceChildren(el("span.muted", { "aria-hidden": "true" }, "…"));
      return;
    }
    if (node.dataset.state === state) return;
    node.dataset.state = state;
    const [name] = filesOf(job);
    if (!name) node.replaceChildren(el("span.muted", { "aria-hidden": "true" }, WORDS[job.status]));
    else if (isArtifact(name)) node.replaceChildren(el("span.muted", { "aria-hidden": "true" }, job.kind));
    else {
      const shot = media(await this.jobs.file(job, name), name, "");
      shot.removeAttribute("aria-label");
      node.replaceChildren(shot, ...(partsOf(job) > 1 ? [el("b.count", { "aria-hidden": "true" }, String(partsOf(job)))] : []));
    }
  }
}
