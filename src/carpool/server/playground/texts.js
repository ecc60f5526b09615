// Texts of a language model, as they are written: newest first, and none is kept by the server.

import { ApiError, stream } from "./api.js";
import { announce, byId, el, plural } from "./dom.js";

const MOST = 24; // texts on the page

/** Write one text, and show it as it grows. */
export async function write({ path, body, title }) {
  const stopping = new AbortController();
  const text = el("p.written-text", { "aria-live": "off" }), line = el("p.muted", {}, "writing");
  const stop = el("button.cancel", { type: "button", onclick: () => stopping.abort() }, "Stop");
  const card = el("article.card.text-card", { "aria-label": title },
    el("div.text", {}, el("p.prompt", { title }, title), text, line, el("div.row.actions", {}, el("span.grow"), stop)));
  byId("empty").hidden = true;
  const place = byId("current");
  place.prepend(card);
  while (place.childElementCount > MOST) place.lastChild.remove();
  const seed = body.seed === undefined ? "" : `seed ${body.seed}`;
  let tokens = 0, end = "";
  try {
    await stream(path, { ...body, stream: true, stream_options: { include_usage: true } }, (kind, chunk) => {
      if (kind === "error") throw new ApiError(500, chunk.error);
      const [choice] = chunk.choices;
      text.textContent += choice?.delta.content || "";
      end = choice?.finish_reason || end;
      tokens = chunk.usage?.completion_tokens ?? tokens + Boolean(choice?.delta.content);
      line.textContent = [`${plural(tokens, "token")}`, { length: "cut off by the limit of tokens" }[end], seed].filter(Boolean).join(" · ");
    }, stopping.signal);
    announce(`Written: ${title}`);
  } catch (error) {
    if (error.name !== "AbortError") {
      line.textContent = error.message;
      card.classList.add("failed");
      if (error.status === 400) throw error; // it belongs to a field of the form
    } else line.textContent = `stopped after ${plural(tokens, "token")}`;
  } finally {
    stop.remove();
  }
}
