// "Try it" on the page of the HTTP API: sends what stands in its fields, and shows the answer.

const base = location.href.replace(/docs([?#].*)?$/, "");
const key = document.getElementById("key");
key.value = sessionStorage.getItem("carpool-key") || "";
key.addEventListener("change", () => sessionStorage.setItem("carpool-key", key.value.trim()));
for (const command of document.querySelectorAll("pre.curl")) {
  command.textContent = command.textContent.replaceAll("http://127.0.0.1:8000/", base);
}

const made = (tag, options, ...children) => {
  const node = Object.assign(document.createElement(tag), options);
  node.append(...children);
  return node;
};
const shortened = (_, value) => (typeof value === "string" && value.length > 400 ? `${value.slice(0, 60)}... (${value.length} characters)` : value);

/** Show what an answer holds: a picture as one, events as they come, JSON with its long texts cut. */
async function show(answer, out) {
  const kind = answer.headers.get("content-type") || "";
  if (kind.startsWith("text/event-stream")) {
    const place = out.appendChild(made("pre", { tabIndex: 0 }));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) place.textContent = (place.textContent + part.value).slice(-20000);
  } else out.append(...await shown(answer, kind));
}

async function shown(answer, kind) {
  if (kind.startsWith("image/")) return [made("img", { src: URL.createObjectURL(await answer.blob()), alt: "The answer" })];
  if (!/json|text/.test(kind)) return [made("a", { href: URL.createObjectURL(await answer.blob()), download: "answer" }, `Download the answer (${kind})`)];
  const text = await answer.text();
  if (!kind.includes("json")) return [made("pre", { tabIndex: 0 }, text.slice(0, 20000))];
  const body = JSON.parse(text);
  const pictures = (Array.isArray(body?.data) ? body.data : []).filter((item) => item?.b64_json);
  return [...pictures.map((item) => made("img", { src: `data:image/png;base64,${item.b64_json}`, alt: "A picture of the answer" })),
    made("pre", { tabIndex: 0 }, JSON.stringify(body, shortened, 2))];
}

for (const place of document.querySelectorAll("details.try")) {
  const { method, path, body } = place.dataset;
  const address = made("input", { value: path, ariaLabel: "Path and query", spellcheck: false });
  const text = body && made("textarea", { value: body, rows: 5, ariaLabel: "Body, in JSON", spellcheck: false });
  const send = made("button", { type: "button" }, `Send ${method}`);
  const stop = made("button", { type: "button", disabled: true }, "Stop");
  const out = made("div", { ariaLive: "polite" });
  place.append(address, ...(text ? [text] : []), send, " ", stop, out);
  let sent = null;
  stop.addEventListener("click", () => sent?.abort());
  send.addEventListener("click", async () => {
    sent = new AbortController();
    [send.disabled, stop.disabled] = [true, false];
    const headers = { ...(key.value && { authorization: `Bearer ${key.value.trim()}` }), ...(text && { "content-type": "application/json" }) };
    const began = performance.now();
    try {
      const answer = await fetch(base + address.value.replace(/^\//, ""), { method, headers, body: text ? text.value : undefined, signal: sent.signal });
      out.replaceChildren(made("p", {}, `${answer.status} after ${((performance.now() - began) / 1000).toFixed(1)} s`));
      await show(answer, out);
    } catch (error) {
      out.append(made("p", {}, error.name === "AbortError" ? "Stopped." : `No answer: ${error.message}`));
    }
    [send.disabled, stop.disabled] = [false, true];
  });
}
