// The page: its views, its key, and what connects them with the server.

import { ApiError, follow, get, post } from "./api.js";
import { byId, duration, el, plural } from "./dom.js";
import { engineView } from "./engine.js";
import { Form } from "./form.js";
import { Gallery } from "./gallery.js";
import { Jobs, isOpen } from "./jobs.js";
import "./key.js";
import { LightBox } from "./lightbox.js";
import { download, filesOf, isArtifact, isPicture, promptOf } from "./media.js";
import { readPicture } from "./metadata.js";
import { Stage } from "./stage.js";
import { write } from "./texts.js";
import { offerUndo, settle } from "./undo.js";

const jobs = new Jobs();
let models = [];

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
  if (name === "engine") engine.show();
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
let drafting = 0;
const form = new Form(byId("form"), async (requests) => {
  settle();
  if (form.isText) {
    showStage();
    await Promise.all(requests.map(write));
    return;
  }
  form.lastSeed = requests.at(-1).body.seed?.toString();
  const results = await Promise.allSettled(requests.map((one) => jobs.submit(one)));
  const bad = results.find((one) => one.status === "rejected");
  const drawn = results.find((one) => one.status === "fulfilled")?.value;
  if (drawn) {
    form.lastSeed = String(drawn.seeds[0]);
    stage.show(drawn.id);
    showStage();
  }
  if (bad) throw await allWrong(bad.reason, requests[0].body);
}, () => {
  clearTimeout(estimating);
  estimating = setTimeout(estimate, 350);
  clearTimeout(drafting);
  drafting = setTimeout(() => form.keepDraft(), 200);
});
addEventListener("pagehide", () => { if (form.entry) form.keepDraft(); });

/** On a screen that has no room for both, bring the drawing into sight. */
const isNarrow = matchMedia("(max-width: 860px)");
function showStage() {
  if (isNarrow.matches) byId("current").scrollIntoView({ block: "start", behavior: "instant" });
}

const asEstimate = ({ background_job, partial_images, images, mask, input_reference, ...rest }) => rest;

/** Ask the server for each field that it refuses: it names one at a time, which is then left out. */
async function refusals(body) {
  const wrong = [];
  for (let rest = { ...body }; wrong.length < 8;) {
    try {
      return { wrong, answer: await post("v1/estimates", rest) };
    } catch (error) {
      if (error.status !== 400) return { wrong };
      wrong.push(error);
      const named = error.param === "size" ? ["width", "height"] : [error.param];
      if (!named.some((name) => name !== "prompt" && name in rest)) return { wrong };
      for (const name of named) delete rest[name];
    }
  }
  return { wrong };
}

/** An error of a drawing, with whatever else the server would refuse. */
async function allWrong(error, body) {
  if (error.status !== 400 || form.isMesh || form.isSound || form.isText) return error;
  const { wrong } = await refusals(asEstimate(body));
  const others = wrong.filter((one) => one.param !== error.param);
  return Object.assign(error, { all: [error, ...others] });
}

/** Ask what the form would take, and whether the server would accept it. */
async function estimate() {
  const place = byId("estimate");
  if (!place || document.hidden) return;
  const mine = form.problems();
  form.showErrors(mine, true);
  place.textContent = "";
  const requests = mine.length ? [] : form.requests();
  if (!requests.length || form.isMesh || form.isSound || form.isText) return;
  const { path, body } = requests[0];
  if (path === "v1/images/edits" || body.input_reference || !body.prompt) return;
  const { wrong, answer } = await refusals(asEstimate(body));
  if (wrong.length) form.showErrors(wrong, true);
  else if (answer && answer.seconds !== null) {
    const seconds = answer.seconds * (body.n || 1) * requests.length / Math.max(1, answer.speed);
    place.textContent = `${form.summary(requests)}: ${seconds < 1 ? "" : "about "}${duration(seconds)}${answer.wait_s > 1 ? `, after ${duration(answer.wait_s)} of waiting` : ""}`;
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
  const draft = Form.draft();
  choose(new URLSearchParams(location.search).get("model") || draft?.model || models[0].id);
  if (draft) form.bringBack(draft);
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

/* What is done with a drawing */

function useSettings(settings, text) {
  const before = form.snapshot();
  show("draw");
  form.restore(settings);
  byId("f-prompt")?.focus();
  offerUndo(text, () => form.bringBack(before));
}

function remove(list) {
  for (const job of list) jobs.hide(job.id);
  offerUndo(list.length === 1 ? `Deleted: ${promptOf(list[0])}` : `Deleted: ${plural(list.length, "drawing")}`,
    () => { for (const job of list) jobs.bringBack(job.id); },
    () => { for (const job of list) jobs.remove(job.id).catch(failed); });
}

const act = trying(async (what, job, name) => {
  if (what === "open") await lightBox.open(job, name);
  if (what === "cancel") await jobs.cancel(job.id);
  if (what === "remove") remove([job].flat());
  if (what === "favour") { gallery.favour(job); changed(job); }
  if (what === "restore") useSettings({ ...job.settings, seed: job.seeds.join(", ") }, `The form has the settings of: ${promptOf(job)}`);
  if (what === "download") await download(job, name, jobs);
  if (what === "vary") {
    const before = form.snapshot();
    show("draw");
    form.restore({ ...job.settings, seed: "", n: Math.min(4, form.entry.limits?.n || 4) });
    await form.draw();
    offerUndo(`The form has the settings of: ${promptOf(job)}`, () => form.bringBack(before));
  }
  if (what === "input") {
    const content = await jobs.content(job, name);
    show("draw");
    if (!form.pictures) throw new ApiError(0, { message: "This model takes no pictures." });
    await form.pictures.add([new File([content], name, { type: content.type })]);
    form.pictures.node.scrollIntoView({ block: "nearest" });
  }
});

/** The entries of a drawing's menu. */
function actions(job) {
  const [name] = filesOf(job);
  const entry = (what, text, isBad = false) => ({ text, isBad, run: () => act(what, job, name) });
  return [
    name && entry("open", "Open"),
    entry("restore", "Use settings"),
    job.status === "completed" && !isArtifact(name) && entry("vary", "Four more with new seeds"),
    name && isPicture(name) && form.pictures && entry("input", "Draw with it"),
    name && entry("download", "Download"),
    !isOpen(job) && entry("remove", "Delete", true),
  ].filter(Boolean);
}

const stage = new Stage(jobs, act, actions);
const gallery = new Gallery(jobs, act, actions, (first, second) => lightBox.compare(first, second));
const lightBox = new LightBox(byId("detail"), jobs, () => (byId("view-gallery").hidden ? stage.order : gallery.order), act);

function changed(job) {
  stage.update(job);
  gallery.update(job);
}
jobs.addEventListener("added", ({ detail: job }) => {
  gallery.add(job);
  if (job.mine || isOpen(job)) stage.add(job, !stage.card || job.mine);
});
jobs.addEventListener("changed", ({ detail: job }) => {
  if (job.mine) stage.add(job, false);
  changed(job);
});
jobs.addEventListener("removed", ({ detail: job }) => { stage.remove(job.id); gallery.remove(job.id); });
byId("more").addEventListener("click", trying(async () => { await jobs.list(true); byId("more").hidden = !jobs.hasMore; }));
jobs.addEventListener("listed", () => {
  if (!stage.card) jobs.all.slice(0, 12).reverse().forEach((job) => stage.add(job));
  byId("empty").hidden = stage.order.length > 0;
  gallery.filter();
});
byId("refresh").addEventListener("click", trying(() => jobs.list()));
/* Pictures that are dropped or pasted anywhere on the page */

async function receive(files) {
  const pictures = files.filter((file) => file.type.startsWith("image/"));
  if (!pictures.length || !form.entry) return;
  const { settings, note } = await readPicture(pictures[0], form.entry);
  show("draw");
  if (settings) {
    const same = jobs.all.find((job) => job.seeds.map(String).includes(String(settings.seed)) && job.settings.prompt);
    useSettings({ ...(settings.prompt === undefined && same ? { prompt: same.settings.prompt } : {}), ...settings }, "The form has the settings of the picture.");
    notice(note);
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

const engine = engineView(jobs, () => tabs.find((name) => !byId(`view-${name}`).hidden));

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
  if (kind === "activity" || kind === "stats") engine[kind](data);
  if (["job", "prompt", "preview"].includes(kind)) jobs.heard(kind, data);
}
follow(heard, (isOpenNow, error) => {
  if (isOpenNow) { if (lastState === "unreachable") { jobs.catchUp().catch(failed); notice(""); } return; }
  if (error?.status === 401) return;
  lastState = "unreachable";
  status("unreachable");
});
setInterval(() => { for (const job of jobs.known.values()) if (isOpen(job)) changed(job); }, 1000);

const wanted = location.hash.slice(1);
if (tabs.includes(wanted)) show(wanted);
load();
