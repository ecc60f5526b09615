// What was just done, with a button that takes it back.

import { byId, el } from "./dom.js";

const SHOWN_MS = 8000;
let pending = null;

/** Carry out what waits for its undo to pass, at once. */
export function settle() {
  const last = pending;
  pending = null;
  clearTimeout(last?.timer);
  byId("toast").replaceChildren();
  last?.finish?.();
}

/**
 * Say what was done, and offer to take it back.
 * @param finish is called once it can be taken back no more
 */
export function offerUndo(text, undo, finish) {
  settle();
  const button = el("button", { type: "button", onclick: () => {
    clearTimeout(pending?.timer);
    pending = null;
    byId("toast").replaceChildren();
    undo();
  } }, "Undo");
  byId("toast").replaceChildren(el("span", {}, text), button);
  pending = { finish };
  const run = () => { if (pending) { clearTimeout(pending.timer); pending.timer = setTimeout(settle, SHOWN_MS); } };
  button.addEventListener("focus", () => { if (button.matches(":focus-visible")) clearTimeout(pending?.timer); }); // keys take longer
  button.addEventListener("blur", run);
  run();
  if (document.activeElement === document.body) button.focus(); // what had the focus has gone
}

addEventListener("pagehide", settle);
