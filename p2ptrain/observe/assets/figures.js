// The figures of the schema, embedded in the page as data: where to find a number in an answer, and how to format it.
// An element with data-figure shows that figure of the status. Elements with data-figures or data-round-figures show
// these figures with code of their own. All other figures are listed, or get a chart.

import * as words from "./words.js";

const FIGURES = JSON.parse(document.getElementById("figures").textContent);
export const OF_ROUND = FIGURES.round;

const FORMATS = {
  "": (number) => (Number.isInteger(number) ? words.count(number) : String(Number(number.toPrecision(4)))),
  "nats a token": words.loss,
  bytes: words.bytes,
  "bytes/s": (number) => `${words.bytes(number)}/s`,
  seconds: (number) => `${words.seconds(number)} s`,
  tokens: words.short,
  "tokens/s": words.short,
  share: words.percent,
  joules: words.energy,
  is: (number) => (number ? "yes" : "no"),
  hours: words.hours,
};
const SAID = ["nats a token", "tokens/s"]; // units to show after the number

export const write = (number, unit) => (number === null ? words.NONE : FORMATS[unit](number));
export const full = (number, unit) => (SAID.includes(unit) && number !== null ? `${write(number, unit)} ${unit}` : write(number, unit));

function valueOf({ path, key }, told) {
  const value = path.reduce((part, name) => part?.[name], told) ?? null;
  return key ? (value?.[key] ?? 0) : value;
}

/** The number of a figure: a list's length, or an object's sum; null if there is none yet. */
export function numberOf(figure, told) {
  const value = valueOf(figure, told);
  if (Array.isArray(value)) return value.length;
  if (value !== null && typeof value === "object") return Object.values(value).reduce((sum, each) => sum + each, 0);
  return value === null || typeof value === "string" ? null : Number(value);
}

function textOf(figure, told) {
  const value = valueOf(figure, told);
  if (typeof value === "string") return words.cut(value);
  if (value !== null && typeof value === "object" && !Array.isArray(value)) return words.reasons(value) || "none";
  return full(numberOf(figure, told), figure.unit);
}

/** The figures that no element with one of these attributes shows. */
export function withoutPlace(figures, ...attributes) {
  const placed = attributes.flatMap((name) =>
    [...document.querySelectorAll(`[${name}]`)].flatMap((element) => element.getAttribute(name).split(",")),
  );
  return figures.filter(({ name, path }) => !placed.includes(name) && !placed.includes(path[0]));
}

let others = null;

function put(element, text, exact = null) {
  if (element.textContent !== text) element.textContent = text;
  if (exact !== null && element.getAttribute("value") !== exact) element.setAttribute("value", exact);
}

/** Shows all figures of the status, formatted for people and exact for programs that read the page. */
export function showFigures(status) {
  const known = new Map(FIGURES.status.map((each) => [each.name, each]));
  for (const element of document.querySelectorAll("data[data-figure]")) {
    const figure = known.get(element.dataset.figure);
    const number = numberOf(figure, status);
    put(element, write(number, element.dataset.unit ?? figure.unit), number === null ? "" : String(number));
  }
  others ??= withoutPlace(FIGURES.status, "data-figure", "data-figures").map((figure) => {
    const [row, title, told] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
    title.textContent = figure.title;
    row.append(title, told);
    document.getElementById("others").append(row);
    return [figure, told];
  });
  for (const [figure, told] of others) put(told, textOf(figure, status));
}
