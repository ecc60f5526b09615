// The files of a job as they are shown: pictures, clips, meshes, sound.

import { isMeshFile, isSoundFile, meshView, soundView } from "./artifacts.js";
import { el } from "./dom.js";
import { isVideoFile } from "./jobs.js";

export const WORDS = { queued: "waiting", in_progress: "drawing", completed: "done", failed: "failed", cancelled: "cancelled", expired: "out of time" };
export const promptOf = (job) => [job.settings?.prompt || []].flat().join(" / ") || (job.task || "").replaceAll("-", " ");
export const isArtifact = (name) => isMeshFile(name) || isSoundFile(name);
export const isPicture = (name) => !isVideoFile(name) && !isArtifact(name);
export const filesOf = (job) => job.files.map((file) => file.name).filter((name) => job.kind !== "video" || isVideoFile(name));
export const partsOf = (job) => Math.max(1, job.parts || job.seeds?.length || 1);

/** A picture or a clip; a clip is silent here, as many may play at once. */
export function media(url, name, text) {
  if (url === null) return el("div.shot.blank.still");
  if (isVideoFile(name)) return el("video.shot", { src: url, muted: true, loop: true, autoplay: !matchMedia("(prefers-reduced-motion: reduce)").matches, playsInline: true, "aria-label": text });
  return el("img.shot", { src: url, alt: text });
}

/** A mesh or sound. */
export async function artifact(job, name, jobs) {
  const content = await jobs.content(job, name).catch(() => null);
  if (content === null) return el("div.shot.blank.still");
  const url = await (job.urls[name] ??= Promise.resolve(URL.createObjectURL(content)));
  return isMeshFile(name) ? meshView(content, name, promptOf(job)) : soundView(content, name, url, promptOf(job));
}

/** "2 of 20 steps shared with others", of a job's report; empty where it shared none. */
export function sharedText(report) {
  const texts = report.outputs.map((output) => {
    const denoise = output.phases.find((phase) => phase.phase === "denoise");
    return [output, denoise?.forwards ? Math.round(output.steps * denoise.shared_forwards / denoise.forwards) : 0];
  });
  const shared = texts.reduce((sum, [, steps]) => sum + steps, 0), all = texts.reduce((sum, [output]) => sum + output.steps, 0);
  return shared ? `${shared} of ${all} steps shared with others` : "";
}

/** Save a file of a job. */
export async function download(job, name, jobs) {
  const link = el("a", { href: await jobs.file(job, name), download: `${job.id}-${name}` });
  link.click();
}
