// The engine's forwards as they happen: kept by `Activity`, drawn by `Lanes`, counted by `Numbers`.

import { byId, bytes, colour, el, plural, prepared, seconds } from "./dom.js";

const LAG_S = 0.5; // events come four times a second: drawn this much later, time flows evenly
const KEPT_S = 70;
const REASONS = {
  nobody: "no other call was waiting", cap: "as wide as is allowed", knee: "wider would not be faster",
  untried: "wider has not been tried yet", group: "others would slow down those who began together",
  split: "a wider one failed and was cut in two",
};
export const reason = (why) => REASONS[why]
  || (why.startsWith("differs:") ? `the others differ in ${why.slice(8)}` : why || "–");

/** What `activity` events said, on the clock of this page. */
export class Activity {
  constructor() { this.reset(); }

  reset() {
    Object.assign(this, { forwards: [], running: [], waiting: [], waitingCount: 0, lanes: new Map(), offset: null, serverNow: 0 });
  }

  /** The engine's clock, as far as it is to be drawn. */
  get now() { return this.offset === null ? 0 : performance.now() / 1000 - this.offset - LAG_S; }

  take(event) {
    const offset = performance.now() / 1000 - event.now_s;
    if (this.offset === null || event.now_s < this.serverNow || Math.abs(offset - this.offset) > 5) {
      this.reset(); // the worker is another one: its clock is, too
      this.offset = offset;
    }
    this.offset += (offset < this.offset ? 0.5 : 0.02) * (offset - this.offset);
    this.serverNow = event.now_s;
    this.running = event.running;
    this.waiting = event.waiting;
    this.waitingCount = event.waiting_count;
    for (const forward of event.forwards) {
      forward.lanes = forward.requests.map((number) => this.#lane(number, forward.began_s + forward.duration_s).index).sort((a, b) => a - b);
      this.forwards.push(forward);
    }
    for (const one of event.running) {
      const lane = this.#lane(one.number, event.now_s);
      if (one.id) lane.id = one.id;
    }
    const oldest = event.now_s - KEPT_S;
    const first = this.forwards.findIndex((one) => one.began_s >= oldest);
    if (first > 0) this.forwards.splice(0, first);
  }

  /** A lane of its own for each request; lanes are used again once their request has long ended. */
  #lane(number, untilS) {
    let lane = this.lanes.get(number);
    if (!lane) {
      const taken = new Set();
      for (const [other, one] of this.lanes) {
        if (one.untilS < this.serverNow - 1.5) { if (one.untilS < this.serverNow - KEPT_S) this.lanes.delete(other); } else taken.add(one.index);
      }
      let index = 0;
      while (taken.has(index)) index += 1;
      lane = { index, sinceS: untilS, untilS, id: null };
      this.lanes.set(number, lane);
    }
    lane.untilS = Math.max(lane.untilS, untilS);
    return lane;
  }

  /** Means over the last seconds: of denoising forwards. */
  means(spanS = 5) {
    const since = this.serverNow - spanS;
    let count = 0, rows = 0, requests = 0, shared = 0;
    for (let i = this.forwards.length - 1; i >= 0 && this.forwards[i].began_s >= since; i -= 1) {
      const one = this.forwards[i];
      if (one.phase !== "denoise") continue;
      count += 1; rows += one.rows; requests += one.requests.length; shared += one.requests.length > 1;
    }
    return { count, rows: count ? rows / count : 0, requests: count ? requests / count : 0, shared: count ? shared / count : 0 };
  }
}

/** Draws lanes on a canvas. */
export class Lanes {
  /** @param nameOf gives the text of a lane for the id of one of the client's own requests */
  constructor(canvas, activity, nameOf, { spanS = 8, isSmall = false } = {}) {
    Object.assign(this, { canvas, activity, nameOf, spanS, isSmall, frozenS: null, hits: [], chosen: null });
  }

  get nowS() { return this.frozenS ?? this.activity.now; }

  draw() {
    const { context, width, height } = prepared(this.canvas);
    if (!width) return;
    const { activity } = this;
    const now = this.nowS, left = now - this.spanS;
    const waiting = this.isSmall ? [] : activity.waiting.slice(0, 8);
    const future = this.isSmall || !waiting.length ? 0 : 0.16;
    const nowX = width * (1 - future) - 1;
    const scale = nowX / this.spanS;
    const visible = [];
    for (let i = activity.forwards.length - 1; i >= 0; i -= 1) {
      const one = activity.forwards[i];
      if (one.began_s + one.duration_s < left) break;
      if (one.began_s <= now) visible.push(one);
    }
    let lanes = 1;
    for (const one of visible) lanes = Math.max(lanes, one.lanes[one.lanes.length - 1] + 1);
    for (const one of activity.running) lanes = Math.max(lanes, (activity.lanes.get(one.number)?.index ?? 0) + 1);
    const waitingHeight = waiting.length ? 18 + waiting.length * 12 : 0;
    const axis = this.isSmall ? 0 : 18;
    const pitch = Math.min(this.isSmall ? 22 : 30, (height - waitingHeight - axis) / lanes);
    const gap = pitch > 8 ? 3 : pitch > 4 ? 1 : 0;
    const colours = { encode: colour("encode"), denoise: colour("denoise"), decode: colour("decode") };
    const line = colour("line"), soft = colour("soft"), ink = colour("ink");
    context.fillStyle = line;
    for (let lane = 0; lane < lanes && pitch > 6; lane += 1) context.fillRect(0, lane * pitch + pitch / 2, nowX, 1);
    this.hits = [];
    for (let i = visible.length - 1; i >= 0; i -= 1) {
      const one = visible[i];
      const x = (one.began_s - left) * scale;
      const end = Math.min(nowX, x + Math.max(1, one.duration_s * scale - (one.duration_s * scale > 4 ? 1 : 0)));
      const wide = end - x;
      context.fillStyle = colours[one.phase];
      context.globalAlpha = one === this.chosen ? 1 : 0.88;
      let from = one.lanes[0], last = from;
      const flush = () => {
        const y = from * pitch + gap / 2, tall = Math.max(1, (last - from + 1) * pitch - gap);
        if (wide > 5 && pitch > 8) { context.beginPath(); context.roundRect(x, y, wide, tall, 3); context.fill(); } else context.fillRect(x, y, wide, tall);
        this.hits.push([x, y, wide, tall, one]);
      };
      for (const lane of one.lanes.slice(1)) {
        if (lane > last + 1) { flush(); from = lane; }
        last = lane;
      }
      flush();
      if (one.lanes.length > 1 && last - one.lanes[0] + 1 > one.lanes.length) {
        context.globalAlpha = 0.4;
        context.fillRect(x + wide / 2 - 0.5, one.lanes[0] * pitch + pitch / 2, 1, (last - one.lanes[0]) * pitch);
      }
      if (one === this.chosen) {
        context.globalAlpha = 1; context.strokeStyle = ink; context.lineWidth = 2;
        context.strokeRect(x - 1, one.lanes[0] * pitch, wide + 2, (last - one.lanes[0] + 1) * pitch);
      }
      if (!this.isSmall && wide > 26 && pitch > 12) {
        context.globalAlpha = 1; context.fillStyle = colour("card"); context.font = "600 11px system-ui, sans-serif";
        context.fillText(String(one.requests.length), x + 6, one.lanes[0] * pitch + pitch / 2 + 4);
      }
    }
    context.globalAlpha = 1;
    this.#labels(context, pitch, left);
    if (!this.isSmall) this.#axis(context, width, height, left, scale, nowX, soft);
    this.#waiting(context, waiting, height - axis - waitingHeight, now, nowX, scale, soft, width);
    context.fillStyle = ink;
    context.fillRect(nowX, 0, 1.5, height - axis);
    if (!visible.length && !activity.running.length) {
      context.fillStyle = soft; context.font = "13px system-ui, sans-serif";
      context.fillText("Nothing runs just now.", 12, Math.min(height / 2 + 4, 64));
    }
  }

  #labels(context, pitch, left) {
    if (pitch < 11) return;
    context.font = "11px system-ui, sans-serif";
    const done = new Set();
    for (const [number, lane] of [...this.activity.lanes].reverse()) {
      if (lane.untilS < left || lane.sinceS > this.nowS || done.has(lane.index)) continue;
      done.add(lane.index);
      const text = lane.id ? this.nameOf(lane.id) : `another client’s, no. ${number}`;
      const wide = Math.min(190, context.measureText(text).width + 12);
      const y = lane.index * pitch + pitch / 2;
      context.fillStyle = colour("card"); context.globalAlpha = 0.86;
      context.beginPath(); context.roundRect(4, y - 8, wide, 16, 4); context.fill();
      context.globalAlpha = 1; context.fillStyle = colour("ink");
      context.save(); context.beginPath(); context.rect(4, y - 8, wide - 4, 16); context.clip();
      context.fillText(text, 10, y + 4); context.restore();
    }
  }

  #axis(context, width, height, left, scale, nowX, soft) {
    const every = [0.5, 1, 2, 5, 10].find((s) => s * scale > 70) || 20;
    context.fillStyle = soft; context.font = "11px system-ui, sans-serif";
    for (let back = 0; back * scale < nowX; back += every) {
      const x = nowX - back * scale;
      context.fillRect(x, height - 18, 1, 4);
      context.fillText(back ? `-${back} s` : "now", back ? x + 3 : x - 24, height - 3);
    }
  }

  #waiting(context, waiting, top, now, nowX, scale, soft, width) {
    if (!waiting.length) return;
    context.font = "11px system-ui, sans-serif"; context.fillStyle = soft;
    context.fillText(`${plural(this.activity.waitingCount, "request")} waiting; to the right of now: when each is likely to start`, 4, top + 12);
    waiting.forEach((one, i) => {
      const y = top + 18 + i * 12, from = Math.max(0, nowX - one.waited_s * scale);
      context.fillStyle = colour("waiting");
      context.globalAlpha = 0.6;
      context.fillRect(from, y, nowX - from, 8);
      context.globalAlpha = 1;
      if (one.starts_s === null) return;
      const x = Math.min(width - 40, nowX + Math.max(2, one.starts_s * scale));
      context.setLineDash([3, 3]); context.strokeStyle = soft;
      context.beginPath(); context.moveTo(nowX, y + 4); context.lineTo(x, y + 4); context.stroke(); context.setLineDash([]);
      context.fillStyle = colour("accent"); context.fillRect(x, y, 3, 8);
      context.fillStyle = soft; context.fillText(`${seconds(one.starts_s)}`, x + 6, y + 8);
    });
  }

  at(x, y) { return this.hits.findLast(([left, top, wide, tall]) => x >= left - 2 && x <= left + wide + 2 && y >= top && y <= top + tall)?.[4] || null; }

  describe(one) {
    const names = one.requests.map((number) => {
      const lane = this.activity.lanes.get(number);
      return lane?.id ? `“${this.nameOf(lane.id)}”` : `no. ${number}`;
    });
    return `${one.module}, ${one.phase}: ${plural(one.requests.length, "request")}, ${plural(one.rows, "row")}, ${seconds(one.duration_s)}. Not wider: ${reason(one.why)}. ${names.join(", ")}`;
  }
}

/** The engine view below its lanes. */
export class Numbers {
  constructor(activity, nameOf) {
    Object.assign(this, { activity, nameOf, stats: null, paces: [] });
    this.boxes = {};
    const make = (id, text) => { this.boxes[id] = el("b", {}, "–"); return el("div.number", {}, this.boxes[id], el("span", {}, text)); };
    byId("numbers").replaceChildren(make("running", "running"), make("waiting", "waiting"), make("pace", "steps a second"),
      make("shared", "requests a forward"), make("rows", "rows a forward"), make("queue", "queue, median"), make("memory", "memory"));
  }

  takeStats(stats) {
    const last = this.paces.at(-1), nowMs = performance.now();
    if (last && stats.steps >= last.steps) last.pace = (stats.steps - last.steps) / ((nowMs - last.atMs) / 1000);
    this.paces.push({ atMs: nowMs, steps: stats.steps, pace: null });
    this.paces = this.paces.filter((one) => one.atMs > nowMs - 180000);
    this.stats = stats;
    this.showStats();
  }

  show() {
    const { activity, boxes } = this, means = activity.means();
    boxes.running.textContent = activity.running.length;
    boxes.waiting.textContent = activity.waitingCount;
    boxes.shared.textContent = means.count ? means.requests.toFixed(1) : "–";
    boxes.rows.textContent = means.count ? means.rows.toFixed(1) : "–";
    const text = activity.running.length
      ? `${plural(activity.running.length, "request")} running, ${activity.waitingCount} waiting; ${Math.round(means.shared * 100)} % of denoising forwards were shared in the last seconds.`
      : "Nothing runs.";
    byId("lanes-text").textContent = text;
    byId("strip-text").textContent = activity.running.length ? text : "Each block is one forward; a block over several lanes is shared.";
    if (byId("requests").closest("details").open) this.#table();
  }

  #table() {
    const row = (cells, kind = "td") => el("tr", {}, cells.map((cell) => el(kind, {}, String(cell))));
    const name = (one) => (one.id ? this.nameOf(one.id) : `another client’s, no. ${one.number}`);
    byId("requests").replaceChildren(el("table", {}, el("thead", {}, row(["Request", "State", "Step", "Predicted"], "th")), el("tbody", {},
      this.activity.running.map((one) => row([name(one), one.phase, `${one.step} of ${one.steps}`, `${seconds(one.left_s)} of work left`])),
      this.activity.waiting.map((one) => row([name(one), "waiting", "", `starts in ${seconds(one.starts_s)}`])))));
  }

  showStats() {
    const { stats, boxes } = this;
    if (!stats) return;
    const pace = this.paces.at(-2)?.pace;
    boxes.pace.textContent = pace === undefined || pace === null ? stats.steps_per_s.toFixed(1) : pace.toFixed(pace < 10 ? 1 : 0);
    boxes.queue.textContent = seconds(stats.waits.median_s);
    boxes.memory.textContent = bytes(stats.memory.reserved_bytes || stats.memory.peak_bytes || stats.memory.weights_bytes);
    if (byId("view-engine").hidden) return;
    this.#throughput();
    this.#why();
    this.#curves();
  }

  #throughput() {
    const { context, width, height } = prepared(byId("throughput"));
    const points = this.paces.filter((one) => one.pace !== null);
    const top = Math.max(1, ...points.map((one) => one.pace)) * 1.15;
    const nowMs = performance.now();
    context.font = "11px system-ui, sans-serif"; context.fillStyle = colour("soft");
    context.fillText(`${top.toFixed(top < 10 ? 1 : 0)} steps a second`, 4, 11);
    context.fillText("three minutes ago", 4, height - 3); context.fillText("now", width - 26, height - 3);
    if (points.length < 2) return;
    context.beginPath();
    const x = (one) => width * (1 - (nowMs - one.atMs) / 180000), y = (one) => (height - 16) * (1 - one.pace / top) + 1;
    points.forEach((one, i) => (i ? context.lineTo(x(one), y(one)) : context.moveTo(x(one), y(one))));
    context.strokeStyle = colour("denoise"); context.lineWidth = 2; context.stroke();
    context.lineTo(x(points.at(-1)), height - 16); context.lineTo(x(points[0]), height - 16);
    context.globalAlpha = 0.13; context.fillStyle = colour("denoise"); context.fill(); context.globalAlpha = 1;
  }

  #why() {
    const counts = {};
    for (const one of this.stats.not_wider) counts[reason(one.why)] = (counts[reason(one.why)] || 0) + one.count;
    const all = Object.entries(counts).sort((a, b) => b[1] - a[1]).slice(0, 7), most = all[0]?.[1] || 1;
    byId("why").replaceChildren(el("div.bars", {}, all.map(([text, count]) => {
      const bar = el("i");
      bar.style.width = `${100 * count / most}%`;
      return el("div.bar-line", {}, el("span", {}, text), bar, el("span.count", {}, count));
    })));
  }

  #curves() {
    const shown = [...this.stats.costs].sort((a, b) => Object.keys(b.seconds).length - Object.keys(a.seconds).length).slice(0, 8);
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
