// The API key: asked for where the server wants one.

import { ApiError, key, onKeyWanted } from "./api.js";
import { byId } from "./dom.js";

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

