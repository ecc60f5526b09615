// A menu of actions below a button: arrow keys, Escape, and a click elsewhere, as menus have them.

import { el } from "./dom.js";

/**
 * A button that opens a menu.
 * @param items gives {text, run, isBad} for each entry, whenever it opens
 */
export function menu(text, label, items) {
  const button = el("button.quiet.menu-button", { type: "button", "aria-haspopup": "menu", "aria-expanded": "false", "aria-label": label }, text);
  button.addEventListener("click", () => open(button, items(), label));
  button.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") { event.preventDefault(); open(button, items(), label); }
  });
  return button;
}

function open(button, items, label) {
  const choose = (item) => { list.hidePopover(); button.focus(); item.run(); };
  const list = el("div.menu", { role: "menu", "aria-label": label, popover: "auto" }, items.map((item) => el(
    `button${item.isBad ? ".bad" : ""}`, { type: "button", role: "menuitem", tabIndex: -1, onclick: () => choose(item) }, item.text)));
  button.closest("dialog, main").append(list);
  list.addEventListener("toggle", (event) => {
    if (event.newState === "open") return;
    button.setAttribute("aria-expanded", "false");
    list.remove();
  });
  list.addEventListener("keydown", (event) => {
    const all = [...list.children], at = all.indexOf(document.activeElement);
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
    if (event.key === "Tab") { list.hidePopover(); button.focus(); return; }
    if (event.key === "Escape") { event.preventDefault(); event.stopPropagation(); list.hidePopover(); button.focus(); return; }
    if (next === undefined) return;
    event.preventDefault();
    all.at(next % all.length).focus();
  });
  list.showPopover();
  button.setAttribute("aria-expanded", "true");
  const place = button.getBoundingClientRect(), box = list.getBoundingClientRect();
  list.style.left = `${Math.max(8, Math.min(place.left, innerWidth - box.width - 8))}px`;
  list.style.top = `${place.bottom + box.height + 4 < innerHeight ? place.bottom + 4 : Math.max(8, place.top - box.height - 4)}px`;
  list.firstElementChild.focus();
}
