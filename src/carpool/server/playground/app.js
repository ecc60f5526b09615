// The page: its views, its key, and what connects them with the server.

import { ApiError, follow, get, key, onKeyWanted, post } from "./api.js";
import { Card, showDetail } from "./cards.js";
import { byId, el, seconds } from "./dom.js";
import { Form } from "./form.js";
import { Jobs, isOpen } from "./jobs.js";
import { readPicture } from "./metadata.js";
import { Numbers } from "./numbers.js";
import { Workers } from "./workers.js";

const MOST_ON_STAGE = 16;
const jobs = new Jobs();
let models = [];

/* Key */

let asking = null;
const keyDialog = byId("key-dialog");

/** Ask for a key; resolves with whether one was given. Several callers share one question. */
function askKey(error = "") {
  asking ??= new Promise((done) => {
    byId("key-error").textContent = error;
    byId("key").value = "";
    keyDialog.returnValue = "";
    byId("key-button").hidden = false;
    keyDialog.showModal();
    keyDialog.addEventListener("close", () => { asking = null; done(keyDialog.returnValue === "given"); }, { once: true });
  });
  return asking;
}
onKeyWanted(async (error) => {
  if (!await askKey(error)) throw new ApiError(401, { message: "This server wants an API key.", code: "invalid_api_key" });
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = byId("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(typed)) { byId("key-error").textContent = "A key has letters, digits and signs, and no spaces."; return; }
  key.set(typed);
  keyDialog.close("given");
});
byId("key-cancel").addEventListener("click", () => keyDialog.close(""));
byId("key-button").addEventListener("click", async () => { if (await askKey()) location.reload(); });
byId("key-button").hidden = !key.get();

/* Notices */

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}
const failed = (error) => { if (error.name !== "AbortError") notice(error.message); };
const trying = (work) => async (...args) => { try { notice(""); return await work(...args); } catch (error) { failed(error); return null; } };

/* Views */

const tabs = ["draw", "gallery", "engine"];
function show(name) {
  for (const one of tabs) {
    const isChosen = one === name, tab = byId(`tab-${one}`);
    tab.setAttribute("aria-selected", isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
    byId(`view-${one}`).hidden = !isChosen;
  }
  history.replaceState(null, "", `#${name}`);
  if (name === "gallery") trying(() => jobs.list())();
  if (name === "engine") numbers.showStats();
}
tabs.forEach((name, i) => {
  const tab = byId(`tab-${name}`);
  tab.addEventListener("click", () => show(name));
  tab.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const next = tabs[(i + by + tabs.length) % tabs.length];
    show(next);
    byId(`tab-${next}`).focus();
  });
});
byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });

const THEMES = ["", "light", "dark"], WORDS = { "": "as the system has them", light: "light", dark: "dark" };
function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem("carpool-theme", name);
  byId("theme").setAttribute("aria-label", `Colours: ${WORDS[name]}`);
  byId("theme").title = `Colours: ${WORDS[name]}`;
}
theme(localStorage.getItem("carpool-theme") || "");
byId("theme").addEventListener("click", () => theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme || "") + 1) % 3]));

/* Draw */

let estimating = 0;
const form = new Form(byId("form"), async (requests) => {
  const results = await Promise.allSettled(requests.map((one) => jobs.submit(one)));
  const bad = results.find((one) => one.status === "rejected");
  if (bad) throw bad.reason;
}, () => {
  clearTimeout(estimating);
  estimating = setTimeout(estimate, 350);
});

/** Ask what the form would take, and whether the server would accept it. */
async function estimate() {
  const place = byId("estimate");
  if (!place || document.hidden) return;
  const requests = form.requests();
  if (!requests.length) { place.textContent = ""; return; }
  const { path, body } = requests[0];
  if (path === "v1/images/edits" || body.input_reference || !body.prompt) { place.textContent = ""; return; }
  const { background_job, partial_images, ...rest } = body;
  try {
    const told = await post("v1/estimates", rest);
    if (told.seconds === null) place.textContent = "";
    else place.textContent = `${form.summary(requests)}: about ${seconds(told.seconds * (body.n || 1) * requests.length / Math.max(1, told.speed))}${told.wait_s > 0.5 ? `, after ${seconds(told.wait_s)} of waiting` : ""}`;
  } catch (error) {
    place.textContent = "";
    if (error.status === 400) form.showError(error, true);
  }
}

async function load() {
  for (;;) {
    try {
      const answer = await get("v1/models");
      models = answer.data;
      notice("");
      break;
    } catch (error) {
      if (error.status === 401) { failed(error); return; }
      notice(error.status === 503 ? "The model is still loading." : error.message);
      await new Promise((done) => setTimeout(done, 1000));
    }
  }
  choose(new URLSearchParams(location.search).get("model") || models[0].id);
  await trying(() => jobs.list())();
}

function choose(id) {
  const entry = models.find((one) => one.id === id) || models[0];
  const kept = form.entry ? { prompt: byId("f-prompt")?.value || "" } : {};
  form.build(entry, models, choose);
  form.fill(kept);
  byId("examples").replaceChildren(...form.examples.map((prompt) => el("button.chip", {
    onclick: () => { form.fill({ prompt }); form.onChange(); form.draw(); },
  }, prompt)));
}

/* Cards: on the stage what this page asked for, in the gallery all */

const act = trying(async (what, job, name) => {
  if (what === "open") await showDetail(byId("detail"), job, jobs, act);
  if (what === "cancel") await jobs.cancel(job.id);
  if (what === "remove") await jobs.remove(job.id);
  if (what === "restore") { show("draw"); form.restore({ ...job.settings, seed: job.seeds.join(", ") }); byId("f-prompt")?.focus(); }
  if (what === "vary") {
    show("draw");
    form.restore({ ...job.settings, seed: "", n: Math.min(4, form.entry.limits?.n || 4) });
    await form.draw();
  }
  if (what === "input") {
    const content = await jobs.content(job, name);
    show("draw");
    if (!form.pictures) throw new ApiError(0, { message: "This model takes no pictures." });
    await form.pictures.add([new File([content], name, { type: content.type })]);
  }
});

const shown = { results: new Map(), gallery: new Map() };
function card(place, job) {
  const made = new Card(job, jobs, act);
  shown[place].set(job.id, made);
  return made.node;
}
function added(job) {
  const root = byId("gallery"), all = jobs.all;
  const next = all.slice(all.indexOf(job) + 1).find((one) => shown.gallery.has(one.id));
  root.insertBefore(card("gallery", job), next ? shown.gallery.get(next.id).node : null);
  if (job.mine || isOpen(job)) stage(job);
}
const emptied = () => { byId("empty").hidden = byId("results").childElementCount > 0; };
function stage(job) {
  if (shown.results.has(job.id)) return;
  byId("results").prepend(card("results", job));
  while (byId("results").childElementCount > MOST_ON_STAGE) {
    shown.results.delete(byId("results").lastElementChild.dataset.job);
    byId("results").lastElementChild.remove();
  }
  emptied();
}
jobs.addEventListener("added", ({ detail }) => added(detail));
jobs.addEventListener("changed", ({ detail }) => {
  if (detail.mine) stage(detail);
  for (const place of Object.values(shown)) place.get(detail.id)?.update();
});
jobs.addEventListener("removed", ({ detail }) => {
  for (const place of Object.values(shown)) { place.get(detail.id)?.node.remove(); place.delete(detail.id); }
  emptied();
});
byId("more").addEventListener("click", trying(async () => { await jobs.list(true); byId("more").hidden = !jobs.hasMore; }));
jobs.addEventListener("listed", () => {
  byId("more").hidden = !jobs.hasMore;
  if (!byId("results").childElementCount) jobs.all.slice(0, 6).forEach((job) => { byId("results").append(card("results", job)); });
  emptied();
});
byId("refresh").addEventListener("click", trying(() => jobs.list()));

/* Pictures that are dropped or pasted anywhere on the page */

async function receive(files) {
  const pictures = files.filter((file) => file.type.startsWith("image/"));
  if (!pictures.length || !form.entry) return;
  const { settings, note } = await readPicture(pictures[0]);
  show("draw");
  if (settings) {
    const same = jobs.all.find((job) => job.seeds.map(String).includes(String(settings.seed)) && job.settings.prompt);
    form.restore({ ...(settings.prompt === undefined && same ? { prompt: same.settings.prompt } : {}), ...settings });
    notice(note);
    byId("f-prompt")?.focus();
  } else if (form.pictures) { await form.pictures.add(pictures); notice(note); }
  else notice([note || "This picture has no settings that are read here,", "and this model takes no pictures."].join(" "));
}
const hasFiles = (event) => [...(event.dataTransfer?.types || [])].includes("Files");
document.addEventListener("dragover", (event) => { if (hasFiles(event)) { event.preventDefault(); byId("drop").hidden = false; } });
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) byId("drop").hidden = true; });
document.addEventListener("drop-done", () => { byId("drop").hidden = true; });
document.addEventListener("drop", (event) => {
  event.preventDefault();
  byId("drop").hidden = true;
  receive([...event.dataTransfer.files]).catch(failed);
});
document.addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
  if (!files.length) return;
  event.preventDefault();
  if (form.pictures) form.pictures.add(files); else receive(files).catch(failed);
});

/* Engine */

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
  workers.draw(tabs.find((name) => !byId(`view-${name}`).hidden));
}
requestAnimationFrame(frame);

const SAID = { ready: "ready", starting: "loading", worker_lost: "restarting", draining: "ending", stopped: "stopped", unreachable: "not reachable" };
function status(state, model = "") {
  byId("status").className = `status ${state === "ready" ? "ready" : "bad"}`;
  byId("status-text").textContent = [model, SAID[state] || state].filter(Boolean).join(": ");
}
let lastState = "";
function heard(kind, data) {
  if (kind === "status") {
    status(data.status, data.model);
    if (data.status === "ready" && lastState && lastState !== "ready") jobs.catchUp().catch(failed);
    if (data.status === "ready" && lastState === "unreachable") notice("");
    lastState = data.status;
  }
  if (kind === "activity") { workers.take(data); numbers.show(); }
  if (kind === "stats") { workers.takeStats(data); numbers.statsChanged(); numbers.show(); }
  if (kind === "job" || kind === "preview") jobs.heard(kind, data);
}
follow(heard, (isOpenNow, error) => {
  if (isOpenNow) { if (lastState === "unreachable") { jobs.catchUp().catch(failed); notice(""); } return; }
  if (error?.status === 401) return;
  lastState = "unreachable";
  status("unreachable");
});
setInterval(() => { for (const job of jobs.known.values()) if (isOpen(job)) for (const place of Object.values(shown)) place.get(job.id)?.update(); }, 1000);

const wanted = location.hash.slice(1);
if (tabs.includes(wanted)) show(wanted);
load();
