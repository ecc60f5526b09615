// What is wrong with the form: all of it at once, at its fields, in the form's own words.

import { byId, el } from "./dom.js";
import { TITLES, title } from "./fields.js";

const PLACES = { size: "width", images: "image", input_reference: "image", mask_image: "mask", negative_prompt_embeds: "negative_prompt" };
const isList = (text) => text.replace(/^\[|\]$/g, "").split(/[\s,]+/).filter(Boolean).every((part) => Number.isFinite(Number(part)));

function numberProblem(input) {
  const { validity, min, max, step } = input;
  if (validity.badInput) return "must be a number";
  if (validity.rangeOverflow) return `must be at most ${max}`;
  if (validity.rangeUnderflow && (step !== min || step === "1")) return `must be at least ${min}`;
  if (!validity.stepMismatch && !validity.rangeUnderflow) return "";
  if (step === "1") return "must be a whole number";
  return `must be a multiple of ${step}: the nearest is ${Math.max(Number(step), Math.round(input.value / step) * step)}`;
}

/** What can be seen without asking the server: {param, message} of each wrong field. */
export function problems(root, parameters) {
  const wrong = [];
  for (const input of root.querySelectorAll("input[id^=f-]")) {
    const { name } = input, text = input.value.trim();
    let message = "";
    if (input.closest("[hidden]") || input.disabled) continue;
    if (input.type === "number") message = numberProblem(input);
    else if (name === "seed" && text && !text.split(/[\s,;]+/).every((part) => /^\d+$/.test(part))) message = "must be whole numbers, with commas between them";
    else if (parameters[name]?.kind === "numbers" && text && !isList(text)) message = "must be a list of numbers, such as [1, 0.5]";
    if (message) wrong.push({ param: name, message: `${title(name)} ${message}.` });
  }
  return wrong;
}

/** A message of the server with the names that stand at the fields. */
function inWords(message) {
  return Object.keys(TITLES).filter((name) => name.includes("_")).reduce(
    (text, name) => text.replaceAll(new RegExp(`\\b${name}=`, "g"), `${title(name)} `).replaceAll(new RegExp(`\\b${name}\\b`, "g"), title(name)), message);
}

export function clearErrors(root) {
  for (const node of root.querySelectorAll(".error")) node.replaceChildren();
  for (const node of root.querySelectorAll("[aria-invalid]")) node.removeAttribute("aria-invalid");
}

function goTo(input) {
  const folded = input.closest("details");
  if (folded) folded.open = true;
  input.focus();
}

/** Show all errors where they belong; the place beside Draw names the fields, and leads to them. */
export function showErrors(root, errors, isQuiet = false) {
  clearErrors(root);
  const inputs = [];
  const elsewhere = [];
  for (const error of errors) {
    const name = PLACES[error.param] || error.param || "";
    const place = name && byId(`e-${name}`), input = byId(`f-${name}`);
    if (place && !place.closest("[hidden]")) place.textContent = inWords(error.message);
    else elsewhere.push(inWords(error.message));
    if (!input || !place) continue;
    input.setAttribute("aria-invalid", "true");
    inputs.push(input);
  }
  const links = inputs.filter((input) => input.type !== "file").map((input) => el("button.link", { type: "button", onclick: () => goTo(input) }, title(input.name)));
  byId("e-").replaceChildren(elsewhere.join(" "), ...(links.length ? [elsewhere.length ? " " : "", "To change: ", ...links] : []));
  if (inputs.length && !isQuiet) goTo(inputs[0]);
}
