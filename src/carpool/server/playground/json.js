// JSON whose large integers are kept: seeds go up to 2^63, numbers of JavaScript are exact to 2^53.

const TOKEN = /"[^"\\]*(?:\\.[^"\\]*)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/gs;
const WHOLE = /^-?\d{16,}$/;

/** A whole number in text: as a number where that is exact, else as the same text. */
export const whole = (text) => (Number.isSafeInteger(Number(text)) ? Number(text) : String(text));

/** Parse JSON; integers beyond 2^53 become texts. */
export function parse(text) {
  if (!/\d{16}/.test(text)) return JSON.parse(text);
  JSON.parse(text); // or it is none
  return JSON.parse(text.replace(TOKEN, (token) => (WHOLE.test(token) && typeof whole(token) === "string" ? `"${token}"` : token)));
}

/** Write JSON; a BigInt is a number in it. */
export function stringify(value) {
  const mark = `${Math.random()}:`; // begins no text of a person's
  const text = JSON.stringify(value, (_, one) => (typeof one === "bigint" ? mark + one : one));
  return text.replaceAll(new RegExp(`"${mark.replace(".", "\\.")}(-?\\d+)"`, "g"), "$1");
}
