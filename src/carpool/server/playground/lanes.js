// A canvas of lanes: time to the right, a lane a running request, a block a forward.

import { reason } from "./activity.js";
import { colour, plural, prepared, seconds } from "./dom.js";

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
    if (!visible.length && !activity.running.length && !waiting.length) {
      this.hits = [];
      if (height < 40) return; // the bar says it already
      context.fillStyle = soft; context.font = "13px system-ui, sans-serif";
      context.fillText("Nothing runs just now.", 4, Math.min(height / 2 + 4, 64));
      return;
    }
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
  }

  #labels(context, pitch, left) {
    if (pitch < (this.isSmall ? 16 : 11)) return; // names would cover the blocks
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
