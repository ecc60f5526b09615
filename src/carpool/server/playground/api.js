// The public HTTP API of this server, and the API key, which lives as long as this tab.

import { parse, stringify } from "./json.js";

const ROOT = new URL("../", import.meta.url); // where the server is, behind a proxy's path too
const STORED = "carpool-key";

export class ApiError extends Error {
  constructor(status, error = {}, retryAfterS = null) {
    super(error.message || `the server answered ${status}`);
    Object.assign(this, { status, code: error.code || "", param: error.param || null, retryAfterS });
  }
}

export const key = {
  get: () => sessionStorage.getItem(STORED) || "",
  set: (text) => (text ? sessionStorage.setItem(STORED, text) : sessionStorage.removeItem(STORED)),
};

/** Is called when the server wants a key, or another one; resolves once there is one. */
let askForKey = async () => {};
export const onKeyWanted = (ask) => { askForKey = ask; };

const headers = () => (key.get() ? { authorization: `Bearer ${key.get()}` } : {});

async function send(path, options = {}) {
  const url = new URL(path.replace(/^\//, ""), ROOT);
  let answer;
  try {
    answer = await fetch(url, { ...options, headers: { ...headers(), ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server cannot be reached.", code: "unreachable" });
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  const waitMs = Number(answer.headers.get("retry-after-ms")) || null;
  throw new ApiError(answer.status, body.error, waitMs && waitMs / 1000);
}

/** One call; where a key is wanted, asks for it and calls again. */
export async function call(path, options = {}) {
  for (;;) {
    const used = key.get();
    try {
      return await send(path, options);
    } catch (error) {
      if (error.status !== 401) throw error;
      if (key.get() === used) await askForKey(used ? "This key is not one of the server's." : "");
    }
  }
}

const json = async (answer) => parse(await answer.text());
export const get = async (path) => json(await call(path));
export const blob = async (path) => (await call(path)).blob();
export const post = async (path, body) => json(await call(path, {
  method: "POST", headers: { "content-type": "application/json" }, body: stringify(body),
}));
export const del = async (path) => json(await call(path, { method: "DELETE", keepalive: true })); // also as the page ends

/** Paths that an answer has begin at the host's root, with the proxy's path in it. */
export const local = (url) => {
  const root = ROOT.pathname;
  return url.startsWith(root) ? url.slice(root.length) : url;
};

/** Follow `GET /v1/events` for ever, through restarts of the server. */
export async function follow(onEvent, onState) {
  let pauseS = 0.5;
  for (;;) {
    try {
      const answer = await call("v1/events");
      onState(true);
      pauseS = 0.5;
      await readEvents(answer.body, onEvent);
    } catch (error) {
      if (error.status === 404 || error.status === 401) return onState(false, error);
      onState(false, error);
    }
    await new Promise((done) => setTimeout(done, pauseS * 1000));
    pauseS = Math.min(pauseS * 1.6, 5);
  }
}

/** Post, and hear the events of the answer; until the signal aborts it. */
export async function stream(path, body, onEvent, signal) {
  const headers = { "content-type": "application/json" };
  const answer = await call(path, { method: "POST", headers, body: stringify(body), signal });
  await readEvents(answer.body, onEvent);
}

async function readEvents(stream, onEvent) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n");
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n");
      const name = lines.find((line) => line.startsWith("event:"));
      if (data && data.trim() !== "[DONE]") onEvent(name ? name.slice(6).trim() : "", JSON.parse(data));
    }
  }
}
