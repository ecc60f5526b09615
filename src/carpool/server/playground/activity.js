// Forwards of one worker as they happen, on the clock of this page.

const LAG_S = 0.5; // events come four times a second: drawn this much later, time flows evenly
const KEPT_S = 70;
const REASONS = {
  nobody: "no other call was waiting", cap: "as wide as is allowed", knee: "wider would not be faster",
  untried: "wider has not been tried yet", group: "wider would delay the requests of the batch",
  split: "a wider one failed and was cut in two", failed: "the choice of calls failed: see the log",
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

  /** Means over the last seconds: of forwards of steps and of tokens. */
  means(spanS = 5) {
    const since = this.serverNow - spanS;
    let count = 0, rows = 0, requests = 0, shared = 0;
    for (let i = this.forwards.length - 1; i >= 0 && this.forwards[i].began_s >= since; i -= 1) {
      const one = this.forwards[i];
      if (one.phase !== "denoise" && !one.module.endsWith(".generate")) continue;
      count += 1; rows += one.rows; requests += one.requests.length; shared += one.requests.length > 1;
    }
    return { count, rows: count ? rows / count : 0, requests: count ? requests / count : 0, shared: count ? shared / count : 0 };
  }
}
