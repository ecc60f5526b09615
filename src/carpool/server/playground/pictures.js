// Reference pictures, by file, drop or paste, and a mask painted on the first of them.

import { el } from "./dom.js";

const SENT_AS_THEY_ARE = ["image/png", "image/jpeg", "image/webp"];

const dataUrl = (blob) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(blob);
});

async function opened(url) {
  const image = new Image();
  image.src = url;
  await image.decode();
  return image;
}

/** A picture as the API takes it: other formats are turned into PNG here. */
async function asUrl(file) {
  const url = await dataUrl(file);
  if (SENT_AS_THEY_ARE.includes(file.type)) return url;
  const image = await opened(url);
  const canvas = el("canvas", { width: image.naturalWidth, height: image.naturalHeight });
  canvas.getContext("2d").drawImage(image, 0, 0);
  return canvas.toDataURL("image/png");
}

export class Pictures {
  constructor(most, canMask, onChange) {
    Object.assign(this, { most, canMask, onChange, items: [], painter: null });
    this.file = el("input", { type: "file", accept: "image/*", multiple: most > 1, hidden: true, id: "f-image",
      "aria-label": "Reference pictures", onchange: () => { this.add([...this.file.files]); this.file.value = ""; } });
    this.thumbs = el("div.thumbs");
    this.painting = el("div");
    const choose = el("button.quiet", { type: "button", onclick: () => this.file.click() }, most > 1 ? "Add reference pictures" : "Add a reference picture");
    this.error = el("p.error", { role: "alert" });
    this.node = el("div.refs", {}, choose, el("p.muted", {}, "or drop or paste one here"), this.file, this.thumbs, this.painting, this.error);
    this.node.addEventListener("dragover", (event) => { event.preventDefault(); event.stopPropagation(); this.node.classList.add("over"); });
    this.node.addEventListener("dragleave", () => this.node.classList.remove("over"));
    this.node.addEventListener("drop", (event) => {
      event.preventDefault(); event.stopPropagation();
      this.node.classList.remove("over");
      document.dispatchEvent(new Event("drop-done"));
      this.add([...event.dataTransfer.files]);
    });
  }

  get given() { return { images: this.items.length, mask: Boolean(this.painter?.isPainted) }; }

  urls() { return { images: this.items.map((one) => one.url), mask: this.painter?.isPainted ? this.painter.url() : null }; }

  async add(files) {
    this.error.textContent = "";
    for (const file of files) {
      try {
        const url = await asUrl(file);
        await opened(url);
        if (this.items.length >= this.most) this.items.pop();
        this.items.push({ url, name: file.name || "picture" });
      } catch {
        this.error.textContent = `${file.name || "This"} is not a picture that the browser can read.`;
      }
    }
    await this.#show();
  }

  /** Have these, and no others. */
  async replace(items) {
    if (items.length === this.items.length && items.every((item, i) => item.url === this.items[i].url)) return;
    this.items = [...items];
    await this.#show();
  }

  async #show() {
    this.thumbs.replaceChildren(...this.items.map((one, i) => el("div.thumb", {},
      el("img", { src: one.url, alt: one.name }),
      el("button", { type: "button", "aria-label": `Remove ${one.name}`, onclick: () => { this.items.splice(i, 1); this.#show(); } }, "×"))));
    this.painter = null;
    this.painting.replaceChildren();
    if (this.canMask && this.items.length === 1) {
      const image = await opened(this.items[0].url);
      if (this.items.length !== 1) return;
      this.painter = new Painter(image, this.onChange);
      const begin = el("button.quiet.chip", { type: "button", onclick: () => {
        this.painting.replaceChildren(this.painter.node);
        this.painter.show();
      } }, "Paint where to draw anew");
      this.painting.replaceChildren(begin);
    }
    this.onChange();
  }
}

/** A mask: what is painted is drawn anew. Keys: arrows move the brush, space paints. */
class Painter {
  constructor(image, onChange) {
    Object.assign(this, { image, onChange, isPainted: false, isErasing: false, at: null });
    const [width, height] = [image.naturalWidth, image.naturalHeight];
    this.mask = el("canvas", { width, height });
    this.canvas = el("canvas", { width, height, tabindex: 0, tabIndex: 0, role: "img",
      "aria-label": "Mask: drag to paint what is to be drawn anew; arrow keys move the brush, space paints" });
    this.size = el("input", { type: "range", min: 2, max: 60, value: 18, "aria-label": "Size of the brush" });
    const erase = el("button.chip", { type: "button", "aria-pressed": "false", onclick: () => {
      this.isErasing = !this.isErasing;
      erase.setAttribute("aria-pressed", this.isErasing);
    } }, "Erase");
    const clear = el("button.chip", { type: "button", onclick: () => {
      this.mask.getContext("2d").clearRect(0, 0, width, height);
      this.isPainted = false; this.show(); onChange();
    } }, "Clear");
    this.node = el("div.painter", {}, this.canvas, el("div.row", {}, el("span.muted", {}, "Brush"), el("span.grow", {}, this.size), erase, clear));
    let last = null;
    const place = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [(event.clientX - box.left) * width / box.width, (event.clientY - box.top) * height / box.height];
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      last = place(event);
      this.#stroke(last, last);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!last) return;
      const next = place(event);
      this.#stroke(last, next);
      last = next;
    });
    this.canvas.addEventListener("pointerup", () => { last = null; onChange(); });
    this.canvas.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!by && event.key !== " ") return;
      event.preventDefault();
      this.at ??= [width / 2, height / 2];
      const pace = Math.max(1, this.#radius() / 2);
      if (by) this.at = [Math.min(width, Math.max(0, this.at[0] + by[0] * pace)), Math.min(height, Math.max(0, this.at[1] + by[1] * pace))];
      if (event.key === " ") { this.#stroke(this.at, this.at); onChange(); }
      this.show();
    });
  }

  #radius() { return Math.max(1, Math.max(this.mask.width, this.mask.height) * this.size.value / 200); }

  #stroke(from, to) {
    const context = this.mask.getContext("2d");
    context.globalCompositeOperation = this.isErasing ? "destination-out" : "source-over";
    context.lineCap = "round";
    context.lineWidth = 2 * this.#radius();
    context.beginPath();
    context.moveTo(...from);
    context.lineTo(to[0] + 0.01, to[1]);
    context.stroke();
    if (!this.isErasing) this.isPainted = true;
    this.show();
  }

  show() {
    const context = this.canvas.getContext("2d");
    const { width, height } = this.canvas;
    context.globalAlpha = 1;
    context.globalCompositeOperation = "source-over";
    context.clearRect(0, 0, width, height);
    context.drawImage(this.mask, 0, 0);
    context.globalCompositeOperation = "source-in";
    context.fillStyle = "#e0409a";
    context.fillRect(0, 0, width, height);
    context.globalAlpha = 0.6;
    context.globalCompositeOperation = "destination-over";
    context.globalAlpha = 1;
    context.drawImage(this.image, 0, 0);
    if (this.at) {
      context.globalCompositeOperation = "difference";
      context.strokeStyle = "#fff";
      context.beginPath();
      context.arc(...this.at, this.#radius(), 0, 7);
      context.stroke();
    }
  }

  /** As the API has masks: transparent where to draw anew. */
  url() {
    const out = el("canvas", { width: this.mask.width, height: this.mask.height });
    const context = out.getContext("2d");
    context.fillStyle = "#fff";
    context.fillRect(0, 0, out.width, out.height);
    context.globalCompositeOperation = "destination-out";
    context.drawImage(this.mask, 0, 0);
    return out.toDataURL("image/png");
  }
}
