// The jobs of this API key: one store for all views. `GET /v1/events` keeps it up to date.

import { blob, del, get, local, post } from "./api.js";

export const isOpen = (job) => job.status === "queued" || job.status === "in_progress";
export const isVideoFile = (name) => name.endsWith(".mp4");

export class Jobs extends EventTarget {
  constructor() {
    super();
    this.known = new Map(); // by id
    this.hidden = new Map(); // deleted, but it can be taken back yet
    this.count = 0; // of those that were added
    this.last = null; // id of the oldest that was listed
    this.hasMore = false;
  }

  /** All of them, the newest first. */
  get all() { return [...this.known.values()].sort((a, b) => b.order - a.order); }

  #tell(job, what) { this.dispatchEvent(new CustomEvent(what, { detail: job })); }

  /** Take in what the server says of a job. */
  put(answer, extra = {}) {
    if (this.hidden.has(answer.id)) return this.hidden.get(answer.id);
    const before = this.known.get(answer.id);
    const job = before || { previews: {}, urls: {}, step: 0, steps: 0, mine: false,
      order: answer.created_at * 1e6 + (extra.isListed ? -1 : 1) * (this.count += 1) };
    const isNew = !before;
    Object.assign(job, answer, extra);
    this.known.set(job.id, job);
    this.#tell(job, isNew ? "added" : "changed");
    return job;
  }

  async submit({ path, body }) {
    const made = await post(path, body);
    const job = await get(`v1/jobs/${made.id}`);
    return this.put(job, { mine: true });
  }

  /** List the newest, or, with `more`, older ones. */
  async list(more = false) {
    const after = more && this.last ? `&after=${this.last}` : "";
    const page = await get(`v1/jobs?limit=24${after}`);
    page.data.forEach((one) => this.put(one, { isListed: true }));
    this.last = page.last_id || this.last;
    this.hasMore = page.has_more;
    if (!more) this.dispatchEvent(new Event("listed"));
  }

  async refresh(id) {
    try {
      return this.put(await get(`v1/jobs/${id}`));
    } catch (error) {
      if (error.status === 404) this.forget(id);
      return null;
    }
  }

  forget(id) {
    const job = this.known.get(id);
    if (!job) return;
    Object.values(job.urls).forEach(async (url) => URL.revokeObjectURL(await url));
    this.known.delete(id);
    this.#tell(job, "removed");
  }

  async cancel(id) { return this.put(await post(`v1/jobs/${id}/cancel`, {})); }

  /** Hide a job that is to be deleted. */
  hide(id) {
    const job = this.known.get(id);
    this.known.delete(id);
    this.hidden.set(id, job);
    this.#tell(job, "removed");
  }

  bringBack(id) {
    const job = this.hidden.get(id);
    this.hidden.delete(id);
    this.known.set(id, job);
    this.#tell(job, "added");
  }

  /** Delete a hidden job. */
  async remove(id) {
    await del(`v1/jobs/${id}`);
    const job = this.hidden.get(id);
    this.hidden.delete(id);
    for (const url of Object.values(job.urls)) URL.revokeObjectURL(await url);
  }

  report(id) { return get(`v1/requests/${id}`); }

  /** The content of a file of a job. */
  content(job, name) { return blob(local(job.files.find((one) => one.name === name).url)); }

  /** A file of a job as a URL of this page; fetched once. */
  file(job, name) {
    job.urls[name] ??= this.content(job, name).then((content) => URL.createObjectURL(content)).catch(() => null);
    return job.urls[name];
  }

  /** An event of the server's. */
  heard(kind, data) {
    const job = this.known.get(data.id);
    if (kind === "job") {
      if (!job || !["in_progress", "queued"].includes(data.status)) { this.refresh(data.id); return; }
      if (data.step !== undefined) {
        job.begunMs = job.step && data.step >= job.step ? job.begunMs : performance.now();
        job.begunStep = job.step && data.step >= job.step ? job.begunStep : data.step;
        Object.assign(job, { step: data.step, steps: data.steps });
      }
      job.status = data.status;
      this.#tell(job, "changed");
    }
    if (kind === "prompt" && job) {
      job.written = { ...job.written, [data.part]: data.text };
      this.#tell(job, "changed");
    }
    if (kind === "preview" && job) {
      job.previews[data.part] = `data:image/webp;base64,${data.webp}`;
      this.#tell(job, "changed");
    }
  }

  /** Ask again for all that were open: after a restart, events were missed. */
  async catchUp() {
    await Promise.all([...this.known.values()].filter(isOpen).map((job) => this.refresh(job.id)));
  }
}

/** Seconds that a running job is likely to take yet, by its own pace; null while unknown. */
export function leftS(job) {
  const done = job.step - (job.begunStep ?? job.step);
  if (!job.steps || done < Math.max(3, job.steps / 20)) return job.eta_s ?? null;
  return (performance.now() - job.begunMs) / 1000 * (job.steps - job.step) / done;
}
