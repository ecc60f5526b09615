// The engine view below its lanes: numbers, throughput, why forwards were not wider, what they cost.

import { reason } from "./activity.js";
import { byId, bytes, colour, el, plural, prepared, seconds } from "./dom.js";

const PACE_MS = 1500; // at least between two points of a plot: workers report one by one
const PLOTTED_MS = 180000;

export class Numbers {
  /**
   * @param workers a `Workers`
   * @param queued gives the number of this client's jobs that no worker has yet
   */
  constructor(workers, nameOf, queued) {
    Object.assign(this, { workers, nameOf, queued, paces: [] });
    this.boxes = {};
    this.plots = {};
    const make = (id, text) => {
      this.boxes[id] = el("b", {}, "–");
      this.plots[id] = el("canvas", { height: 26, "aria-hidden": "true" });
      return el("div.number", {}, this.boxes[id], el("span", {}, text), this.plots[id]);
    };
    byId("numbers").replaceChildren(make("running", "running"), make("waiting", "waiting"), make("pace", "steps a second"),
      make("shared", "requests a forward"), make("rows", "rows a forward"), make("queue", "queue, median"), make("memory", "memory"));
  }

  /** New statistics of a worker are there. */
  statsChanged() {
    const last = this.paces.at(-1), nowMs = performance.now();
    if (!last || nowMs - last.atMs > PACE_MS) {
      const steps = this.workers.sum((stats) => stats.steps);
      const pace = last && steps >= last.steps ? (steps - last.steps) / ((nowMs - last.atMs) / 1000) : null;
      const means = this.workers.means(), { running, waitingCount, stats } = this.workers;
      this.paces.push({
        atMs: nowMs, steps, pace, running: running.length, waiting: waitingCount + this.queued(),
        shared: means.count ? means.requests : 0, rows: means.count ? means.rows : 0,
        queue: Math.max(...stats.map((one) => one.waits.median_s)), memory: this.workers.sum(memoryOf),
      });
      this.paces = this.paces.filter((one) => one.atMs > nowMs - PLOTTED_MS);
    }
    this.showStats();
  }

  show() {
    const { workers, boxes } = this, means = workers.means(), running = workers.running.length, waiting = workers.waitingCount + this.queued();
    boxes.running.textContent = running;
    boxes.waiting.textContent = waiting;
    boxes.shared.textContent = means.count ? means.requests.toFixed(1) : "–";
    boxes.rows.textContent = means.count ? means.rows.toFixed(1) : "–";
    const text = running || waiting
      ? `${plural(running, "request")} running, ${waiting || "none"} waiting${means.shared ? `; ${Math.round(means.shared * 100)} % of the last seconds' steps shared` : ""}.`
      : "Nothing runs.";
    byId("lanes-text").textContent = text;
    byId("strip-text").textContent = running || waiting ? text : "Each block is one forward; a block over several lanes is shared.";
    if (byId("requests").closest("details").open) this.#table();
  }

  #table() {
    const row = (cells, kind = "td") => el("tr", {}, cells.map((cell) => el(kind, {}, String(cell))));
    const name = (one) => (one.id ? this.nameOf(one.id) : `another client’s, no. ${one.number}`);
    const where = (one) => (this.workers.areSeveral ? [one.worker] : []);
    byId("requests").replaceChildren(el("table", {}, el("thead", {}, row(["Request", "State", "Step", "Predicted", ...(this.workers.areSeveral ? ["Worker"] : [])], "th")), el("tbody", {},
      this.workers.running.map((one) => row([name(one), one.phase, one.phase === "encode" && one.tokens ? plural(one.tokens, "token") : `${one.step} of ${one.steps}`, `${seconds(one.left_s)} of work left`, ...where(one)])),
      this.workers.waiting.map((one) => row([name(one), "waiting", "", `starts in ${seconds(one.starts_s)}`, ...where(one)])))));
  }

  showStats() {
    const all = this.workers.stats, { boxes } = this;
    if (!all.length) return;
    const pace = this.paces.at(-1)?.pace;
    const shown = pace === undefined || pace === null ? this.workers.sum((stats) => stats.steps_per_s) : pace;
    boxes.pace.textContent = shown.toFixed(shown < 10 ? 1 : 0);
    boxes.queue.textContent = seconds(Math.max(...all.map((stats) => stats.waits.median_s)));
    boxes.memory.textContent = bytes(this.workers.sum(memoryOf));
    if (byId("view-engine").hidden) return;
    this.#throughput();
    for (const [id, canvas] of Object.entries(this.plots)) {
      const points = this.#points(id), { context, width, height } = prepared(canvas);
      plot(context, points, width, height, 1.1 * Math.max(1e-9, ...points.map((one) => one.value)));
    }
    this.#why();
    this.#curves();
  }

  #points(id) {
    return this.paces.filter((one) => one[id] !== null).map((one) => ({ atMs: one.atMs, value: one[id] }));
  }

  #throughput() {
    const { context, width, height } = prepared(byId("throughput"));
    const points = this.#points("pace"), top = Math.max(1, ...points.map((one) => one.value)) * 1.15;
    context.font = "11px system-ui, sans-serif"; context.fillStyle = colour("soft");
    context.fillText(`${top.toFixed(top < 10 ? 1 : 0)} steps a second`, 4, 11);
    context.fillText(`${seconds(plottedMs(points) / 1000)} ago`, 4, height - 3); context.fillText("now", width - 26, height - 3);
    plot(context, points, width, height - 16, top);
  }

  #why() {
    const counts = {};
    for (const one of this.workers.stats.flatMap((stats) => stats.not_wider)) counts[reason(one.why)] = (counts[reason(one.why)] || 0) + one.count;
    const all = Object.entries(counts).sort((a, b) => b[1] - a[1]).slice(0, 7), most = all[0]?.[1] || 1;
    byId("why").replaceChildren(el("div.bars", {}, all.map(([text, count]) => {
      const bar = el("i");
      bar.style.width = `${100 * count / most}%`;
      return el("div.bar-line", {}, el("span", {}, text), bar, el("span.count", {}, count));
    })));
  }

  #curves() {
    const kinds = new Map(); // several workers learn of the same kinds: the one that knows most is shown
    for (const stats of this.workers.stats) {
      for (const one of stats.costs) {
        const kind = `${stats.model} ${one.name} ${one.detail}`, other = kinds.get(kind);
        if (!other || Object.keys(one.seconds).length > Object.keys(other.seconds).length) kinds.set(kind, one);
      }
    }
    const shown = [...kinds.values()].sort((a, b) => Object.keys(b.seconds).length - Object.keys(a.seconds).length).slice(0, 8);
    const root = byId("curves");
    shown.forEach((one, i) => {
      const box = root.children[i] || root.appendChild(el("div", {}, el("h3"), el("canvas", { role: "img" }), el("p.muted")));
      const points = Object.entries(one.seconds).map(([rows, s]) => [Number(rows), s]);
      const knee = points.reduce((best, point) => (point[0] / point[1] > best[0] / best[1] * 1.02 ? point : best), points[0]);
      box.children[0].textContent = `${one.name} ${one.detail}`;
      box.children[2].textContent = `best at ${plural(knee[0], "row")}: ${seconds(knee[1])}, ${(knee[0] / knee[1]).toFixed(0)} rows a second`;
      box.children[1].setAttribute("aria-label", points.map(([rows, s]) => `${plural(rows, "row")} ${seconds(s)}`).join(", "));
      this.#curve(box.children[1], points, knee);
    });
    while (root.children.length > shown.length) root.lastChild.remove();
    if (!shown.length) root.replaceChildren();
  }

  #curve(canvas, points, knee) {
    const { context, width, height } = prepared(canvas);
    const right = Math.max(2, points.at(-1)[0]), top = Math.max(...points.map((point) => point[1])) * 1.2;
    const x = (rows) => 8 + (width - 24) * (rows - 1) / (right - 1), y = (s) => (height - 18) * (1 - s / top);
    context.font = "11px system-ui, sans-serif"; context.fillStyle = colour("soft");
    context.fillText(seconds(top), 2, 10); context.fillText("1 row", 4, height - 3); context.fillText(String(right), width - 20, height - 3);
    context.strokeStyle = colour("line"); context.beginPath(); context.moveTo(8, height - 18); context.lineTo(width - 8, height - 18); context.stroke();
    context.beginPath(); context.strokeStyle = colour("denoise"); context.lineWidth = 2;
    points.forEach(([rows, s], i) => (i ? context.lineTo(x(rows), y(s)) : context.moveTo(x(rows), y(s))));
    context.stroke(); context.lineWidth = 1;
    for (const [rows, s] of points) {
      context.fillStyle = rows === knee[0] ? colour("encode") : colour("denoise");
      context.beginPath(); context.arc(x(rows), y(s), rows === knee[0] ? 5 : 3, 0, 7); context.fill();
    }
  }
}

/** As long as there are points, but never so short that one of them fills a plot. */
const plottedMs = (points) => Math.min(PLOTTED_MS, Math.max(20000, performance.now() - (points[0]?.atMs ?? 0)));

/** A line of the last minutes, filled below, in the upper `height` pixels. */
function plot(context, points, width, height, top) {
  if (points.length < 2) return;
  const nowMs = performance.now(), spanMs = plottedMs(points);
  const x = (one) => width * (1 - (nowMs - one.atMs) / spanMs), y = (one) => (height - 1) * (1 - one.value / top) + 1;
  context.beginPath();
  points.forEach((one, i) => (i ? context.lineTo(x(one), y(one)) : context.moveTo(x(one), y(one))));
  context.strokeStyle = colour("denoise"); context.lineWidth = 2; context.stroke();
  context.lineTo(x(points.at(-1)), height); context.lineTo(x(points[0]), height);
  context.globalAlpha = 0.13; context.fillStyle = colour("denoise"); context.fill(); context.globalAlpha = 1;
}

/** Bytes that a worker holds: those of its device, or of its process. */
export const memoryOf = (stats) => stats.memory.reserved_bytes || stats.memory.peak_bytes || stats.memory.weights_bytes || 0;
