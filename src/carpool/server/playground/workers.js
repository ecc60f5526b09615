// The workers of the server, each with its forwards, its lanes and what it says of itself.

import { Activity } from "./activity.js";
import { byId, bytes, el, plural } from "./dom.js";
import { Lanes } from "./lanes.js";
import { memoryOf } from "./numbers.js";

const SILENT_MS = 10000; // statistics come every two seconds: a worker without them has gone

export class Workers {
  /**
   * @param nameOf gives the text of a lane for the id of one of the client's own requests
   * @param onCanvas is given each new canvas of the engine view with its `Lanes`
   */
  constructor(nameOf, onCanvas) {
    Object.assign(this, { nameOf, onCanvas, known: new Map(), spanS: 8 });
    this.#worker({ model: "", worker: 0 }); // so that the page is not empty before the first word
  }

  get areSeveral() { return this.known.size > 1; }
  get all() { return [...this.known.values()]; }
  get stats() { return this.all.map((one) => one.stats).filter(Boolean); }
  get running() { return this.all.flatMap((one) => one.activity.running.map((request) => ({ ...request, worker: one.name }))); }
  get waiting() { return this.all.flatMap((one) => one.activity.waiting.map((request) => ({ ...request, worker: one.name }))); }
  get forwards() { return this.all.flatMap((one) => one.activity.forwards); }

  /** Requests that wait: at workers, and, with several, at the front. */
  get waitingCount() {
    const held = new Map(this.stats.map((stats) => [stats.model, stats.held || 0]));
    return this.all.reduce((sum, one) => sum + one.activity.waitingCount, 0) + [...held.values()].reduce((sum, count) => sum + count, 0);
  }

  sum(of) { return this.stats.reduce((sum, stats) => sum + of(stats), 0); }

  /** As those of an `Activity`, of all workers. */
  means() {
    const all = this.all.map((one) => one.activity.means()), count = all.reduce((sum, one) => sum + one.count, 0);
    const mean = (name) => (count ? all.reduce((sum, one) => sum + one[name] * one.count, 0) / count : 0);
    return { count, rows: mean("rows"), requests: mean("requests"), shared: mean("shared") };
  }

  take(event) {
    const one = this.#worker(event);
    one.activity.take(event);
    this.#caption(one);
  }

  takeStats(stats) {
    const one = this.#worker(stats);
    one.stats = stats;
    one.heardMs = performance.now();
    this.#caption(one);
    for (const other of this.all) {
      if (this.areSeveral && other.heardMs && performance.now() - other.heardMs > SILENT_MS) this.#forget(other);
    }
  }

  /** Draw what is to be seen. */
  draw(view) {
    for (const one of this.all) {
      if (view === "draw") one.strip.draw();
      if (view === "engine") { one.lanes.spanS = this.spanS; one.lanes.draw(); }
    }
  }

  #worker({ model, worker }) {
    const key = `${model} ${worker}`, first = this.known.get(" 0");
    if (!this.known.has(key) && first && model) { // what stood there before the first word
      this.known.delete(" 0");
      this.known.set(key, Object.assign(first, { model, number: worker }));
      this.#layOut();
    }
    if (!this.known.has(key)) {
      const activity = new Activity(), isFirst = !this.known.size;
      const canvas = el("canvas", { id: isFirst ? "lanes" : "", className: "lanes", tabIndex: 0, role: "img", "aria-describedby": "lanes-text" });
      const small = el("canvas", { id: isFirst ? "strip" : "", className: "strip-lanes", role: "img", "aria-label": "Forwards of the last seconds" });
      const caption = el("p.worker"), label = el("p.worker");
      const one = { model, number: worker, activity, stats: null, heardMs: 0, caption, label, node: el("div", {}, caption, canvas), small: el("div", {}, label, small) };
      one.lanes = new Lanes(canvas, activity, this.nameOf);
      one.strip = new Lanes(small, activity, this.nameOf, { spanS: 6, isSmall: true });
      this.known.set(key, one);
      this.onCanvas(canvas, one.lanes, activity);
      this.#layOut();
    }
    return this.known.get(key);
  }

  #forget(one) {
    this.known.delete(`${one.model} ${one.number}`);
    one.node.remove();
    one.small.remove();
    this.#layOut();
  }

  /** In the order of their names; the more there are, the lower each one is. */
  #layOut() {
    const models = new Set(this.all.map((one) => one.model));
    const sorted = this.all.sort((a, b) => a.model.localeCompare(b.model) || a.number - b.number);
    for (const one of sorted) {
      one.name = models.size === sorted.length ? one.model : [models.size > 1 && one.model, `worker ${one.number}`].filter(Boolean).join(" ");
      one.lanes.canvas.setAttribute("aria-label", `${this.areSeveral ? `${one.name}: f` : "F"}orwards of the last seconds; arrow keys go from one to the next`);
      one.node.dataset.worker = one.small.dataset.worker = one.name;
      byId("workers").append(one.node);
      byId("strips").append(one.small);
      this.#caption(one);
    }
    for (const id of ["workers", "strips"]) byId(id).dataset.count = Math.min(3, sorted.length);
  }

  #caption(one) {
    one.caption.hidden = one.label.hidden = !this.areSeveral;
    if (!this.areSeveral) return;
    const { running, waitingCount } = one.activity, held = memoryOf(one.stats || { memory: {} });
    one.label.textContent = one.name;
    one.caption.textContent = [one.name, one.stats?.memory.device, `${plural(running.length, "request")} running`, waitingCount && `${waitingCount} waiting`, held && bytes(held)].filter(Boolean).join(" · ");
  }
}
