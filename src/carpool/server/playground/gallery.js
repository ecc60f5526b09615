// The gallery: search, favourites, and several drawings chosen at once.

import { byId, el, plural } from "./dom.js";
import { Card } from "./cards.js";
import { isOpen } from "./jobs.js";
import { download, filesOf, isPicture, promptOf } from "./media.js";

const STORED = "carpool-favourites"; // ids, in this browser
const ENOUGH = 24; // matches before older pages are no longer asked for
const MOST_PAGES = 40;

export class Gallery {
  /**
   * @param act is called with an action and a job; "remove" takes a list
   * @param compare is given two pairs of a job and a file
   */
  constructor(jobs, act, actions, compare) {
    Object.assign(this, { jobs, act, actions, compare, cards: new Map(), chosen: new Set() });
    this.favourites = new Set(JSON.parse(localStorage.getItem(STORED) || "[]"));
    byId("search").addEventListener("input", () => this.filter());
    for (const id of ["favourites", "choose"]) {
      byId(id).addEventListener("click", () => {
        byId(id).setAttribute("aria-pressed", byId(id).getAttribute("aria-pressed") !== "true");
        if (id === "choose") this.#choosing(); else this.filter();
      });
    }
  }

  get isChoosing() { return byId("choose").getAttribute("aria-pressed") === "true"; }

  /** Jobs that are shown, the newest first. */
  get order() { return this.jobs.all.filter((job) => this.cards.has(job.id) && !this.cards.get(job.id).node.hidden); }

  add(job) {
    job.isFavourite = this.favourites.has(job.id);
    const card = new Card(job, this.jobs, this.act, this.actions);
    const box = el("input", { type: "checkbox", onchange: () => { this.chosen[box.checked ? "add" : "delete"](job.id); this.#tell(); } });
    card.node.prepend(el("label.chooser", { hidden: !this.isChoosing }, box, el("span.hidden-text", {}, `Choose: ${promptOf(job)}`)));
    this.cards.set(job.id, card);
    const all = this.jobs.all, next = all.slice(all.indexOf(job) + 1).find((other) => this.cards.get(other.id)?.node.isConnected);
    byId("gallery").insertBefore(card.node, next ? this.cards.get(next.id).node : null);
    card.node.hidden = !this.#matches(job);
  }

  update(job) { this.cards.get(job.id)?.update(); }

  remove(id) {
    this.cards.get(id)?.node.remove();
    this.cards.delete(id);
    if (this.chosen.delete(id)) this.#tell();
  }

  favour(job) {
    job.isFavourite = !job.isFavourite;
    this.favourites[job.isFavourite ? "add" : "delete"](job.id);
    localStorage.setItem(STORED, JSON.stringify([...this.favourites]));
    this.filter();
  }

  #matches(job) {
    if (byId("favourites").getAttribute("aria-pressed") === "true" && !job.isFavourite) return false;
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = [promptOf(job), job.model, job.task, ...(job.seeds || []), job.settings?.negative_prompt || ""].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  }

  /** Show what matches; older pages are asked for while few do. */
  async filter() {
    const isNarrow = Boolean(byId("search").value.trim()) || byId("favourites").getAttribute("aria-pressed") === "true";
    const show = () => {
      let count = 0;
      for (const [id, card] of this.cards) {
        card.node.hidden = !this.#matches(this.jobs.known.get(id) || card.job);
        count += !card.node.hidden;
      }
      byId("no-match").textContent = count ? "" : isNarrow ? "Nothing here matches." : "The gallery is empty.";
      return count;
    };
    const run = this.run = Symbol("a search");
    for (let page = 0; show() < ENOUGH && isNarrow && this.jobs.hasMore && page < MOST_PAGES && this.run === run; page += 1) {
      await this.jobs.list(true);
    }
    byId("more").hidden = !this.jobs.hasMore;
  }

  #choosing() {
    if (!this.isChoosing) this.chosen.clear();
    for (const card of this.cards.values()) {
      const label = card.node.querySelector(".chooser");
      label.hidden = !this.isChoosing;
      label.firstElementChild.checked = this.chosen.has(card.job.id);
    }
    this.#tell();
  }

  /** The bar that says how many are chosen, and what can be done with them. */
  #tell() {
    const jobs = [...this.chosen].map((id) => this.jobs.known.get(id)).filter(Boolean);
    const files = jobs.flatMap((job) => filesOf(job).map((name) => [job, name]));
    const pictures = files.filter(([, name]) => isPicture(name));
    const button = (text, run, isOff = false) => el("button", { type: "button", disabled: isOff, onclick: run }, text);
    byId("chosen").hidden = !this.isChoosing;
    byId("chosen").replaceChildren(
      el("span", { role: "status" }, `${plural(jobs.length, "drawing")} chosen`),
      button("All shown", () => { for (const job of this.order) this.chosen.add(job.id); this.#choosing(); }),
      button("Download", async () => { for (const [job, name] of files) await download(job, name, this.jobs); }, !files.length),
      button("Favourite", () => { for (const job of jobs) { if (!job.isFavourite) this.favour(job); this.update(job); } }, !jobs.length),
      button("Compare", () => this.compare(pictures[0], pictures[1]), pictures.length !== 2),
      button("Delete", () => { this.act("remove", jobs.filter((job) => !isOpen(job))); this.chosen.clear(); this.#choosing(); }, !jobs.length),
    );
  }
}
