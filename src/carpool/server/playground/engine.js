// The engine view: lanes to point at and to pause, numbers, and the thin bar of the stage.

import { byId } from "./dom.js";
import { Numbers } from "./numbers.js";
import { Workers } from "./workers.js";

/** @param view gives the name of the view that is shown */
export function engineView(jobs, view) {
  const nameOf = (id) => String(jobs.known.get(id)?.settings?.prompt || id);
  let frozen = false;
  function freeze(isFrozen) {
    frozen = isFrozen;
    for (const { lanes } of workers.all) {
      lanes.frozenS = isFrozen ? lanes.nowS : null;
      if (!isFrozen) lanes.chosen = null;
    }
    byId("pause").setAttribute("aria-pressed", isFrozen);
  }
  const workers = new Workers(nameOf, (canvas, lanes, activity) => {
    function choice(one) {
      lanes.chosen = one;
      byId("block").textContent = one ? lanes.describe(one) : "\u00a0";
    }
    canvas.addEventListener("pointermove", (event) => { const box = canvas.getBoundingClientRect(); choice(lanes.at(event.clientX - box.left, event.clientY - box.top)); });
    canvas.addEventListener("pointerleave", () => { if (!frozen) choice(null); });
    canvas.addEventListener("click", () => freeze(!frozen));
    canvas.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === " " || event.key === "Enter") { event.preventDefault(); freeze(!frozen); }
      if (!by) return;
      event.preventDefault();
      if (!frozen) freeze(true);
      const all = activity.forwards.filter((one) => one.began_s <= lanes.nowS);
      const at = lanes.chosen ? all.indexOf(lanes.chosen) : all.length;
      choice(all[Math.min(all.length - 1, Math.max(0, at + by))] || null);
    });
  });
  const numbers = new Numbers(workers, nameOf, () => [...jobs.known.values()].filter((job) => job.status === "queued").length);
  byId("span").addEventListener("change", () => { workers.spanS = Number(byId("span").value); });
  byId("pause").addEventListener("click", () => freeze(!frozen));

  let drawnMs = 0;
  function frame(nowMs) {
    requestAnimationFrame(frame);
    const isBusy = workers.all.some(({ activity }) => activity.running.length || activity.waiting.length || activity.forwards.length);
    if (nowMs - drawnMs < (isBusy ? (workers.spanS > 10 ? 90 : 30) : 500)) return;
    drawnMs = nowMs;
    workers.draw(view());
  }
  requestAnimationFrame(frame);

  byId("ride-button").addEventListener("click", () => {
    const isOpen = byId("ride").classList.toggle("open");
    byId("ride-button").setAttribute("aria-expanded", isOpen);
  });
  return {
    show: () => numbers.showStats(),
    activity: (data) => { workers.take(data); numbers.show(); },
    stats: (data) => { workers.takeStats(data); numbers.statsChanged(); numbers.show(); },
  };
}
