// Formats numbers and complaints for people. Text is inserted into the page as text only, never as HTML.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const brief = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const TEXT_MAX = 400; // characters of a text that may come from a peer
const NAME_MAX = 60;
const TAIL = 8; // characters at the end of a peer's id: all begin alike

export const NONE = "–";

export const count = (number) => whole.format(number);
export const short = (number) => (Math.abs(number) < 10_000 ? count(number) : brief.format(number));
export const loss = (number) => number.toFixed(4);

export function percent(part) {
  const hundredths = 100 * part;
  return `${hundredths >= 10 || hundredths === 0 ? hundredths.toFixed(0) : hundredths.toFixed(hundredths >= 1 ? 1 : 2)}%`;
}

export function bytes(size) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (size >= 1_000 && unit < units.length - 1) {
    size /= 1_000;
    unit += 1;
  }
  return `${unit === 0 || size >= 100 ? size.toFixed(0) : size.toFixed(1)} ${units[unit]}`;
}

/** Formats the duration of a round, exactly enough to compare. */
export const seconds = (number) => (number < 10 ? number.toFixed(2) : number.toFixed(1));

/** Formats a round trip. */
export function delay(number) {
  if (number >= 1) return `${number.toFixed(1)} s`;
  return `${number < 0.01 ? (1_000 * number).toFixed(1) : count(1_000 * number)} ms`;
}

export function duration(number) {
  const total = Math.floor(number);
  if (total < 60) return `${total} s`;
  if (total < 3_600) return `${Math.floor(total / 60)} min`;
  if (total < 86_400) return `${Math.floor(total / 3_600)} h ${Math.floor((total % 3_600) / 60)} min`;
  return `${Math.floor(total / 86_400)} d ${Math.floor((total % 86_400) / 3_600)} h`;
}

export const energy = (joules) => `${(joules / 3.6e6).toFixed(2)} kWh`;

export function hours(number) {
  const found = number / 3_600;
  return found < 10 ? found.toFixed(2) : found.toFixed(1);
}

export const few = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;

export const cut = (text, most = TEXT_MAX) => (text.length > most ? `${text.slice(0, most)}…` : text);
export const name = (text) => cut(text, NAME_MAX);
export const peer = (id) => (id.length > TAIL + 1 ? `…${id.slice(-TAIL)}` : id);
export const digest = (hex) => hex.slice(0, 12);

/** Formats {reason: number}, the most frequent first. */
export function reasons(counts) {
  return Object.entries(counts)
    .filter(([, number]) => number > 0)
    .sort(([, one], [, other]) => other - one)
    .slice(0, 8)
    .map(([reason, number]) => `${cut(reason, 40)} ${count(number)}`)
    .join(", ");
}

// ---------------------------------------------------------------------------------------------------
// Health

const GRAVITY = ["good", "info", "warning", "error"];
const STATES = { good: "All is well", info: "All is well", warning: "Getting there", error: "Needs a look" };

/** The complaints, and the overall state in a word. */
export function health(status) {
  const told = status.complaints.map(({ severity, title, advice, text }) => ({ severity, title, advice, raw: cut(text) }));
  const worst = GRAVITY[told.reduce((most, each) => Math.max(most, GRAVITY.indexOf(each.severity)), 0)];
  if (told.length === 0) {
    const advice = "It is connected, its disk works, it has the same model as the others, and its contributions count.";
    told.push({ severity: "good", title: "No complaints", advice, raw: "" });
  }
  return { told, state: worst === "info" ? "good" : worst, word: STATES[worst] };
}

/** A motion about the run's future, and where this node stands. */
export function motion(each, isDecided) {
  const costs = each.costs.length > 0 ? ` Here ${each.costs.join("; ")}.` : "";
  const mine = each.obstacle ? `cannot assent: ${each.obstacle}` : each.is_mine ? "does" : "does not";
  const advice = isDecided
    ? `It is decided. This node ${each.is_mine ? "goes along" : "does not go along, and ends then"}.`
    : `${peer(each.author)} moves it; ${count(each.assents)} of ${count(each.needed)} needed assent. This node ${mine}.`;
  return { title: cut(`That the run ${each.text}`), advice: cut(advice + costs) };
}

// Why the page has no rounds to show, or only the newest ones.
const LACKING = {
  coming: "Loading the rounds …",
  late: "Earlier rounds could not be loaded: the connection is slow, or the node is busy. This page keeps trying.",
  here: "No round has been applied here yet.",
};

export const noRounds = (whether) => LACKING[whether];

/** Says how many rounds are shown, and whether some are missing. */
export function rounds({ total, stride }, whether) {
  if (total === 0) return { coming: "Loading rounds …", late: "Rounds not loaded yet.", here: "No rounds yet." }[whether];
  const merged = stride > 1 ? `; a point is the mean of ${count(stride)}` : "";
  const lacking = whether === "late" ? "; newer ones could not be loaded yet, and are requested again" : "";
  return `${few(total, "round", "rounds")} on this page${merged}${lacking}`;
}

/** Describes what the node is doing now. */
export function doing(status) {
  const what = {
    train: `step ${count(status.step)} of training`,
    collect: status.waiting_for > 0 ? `waiting for ${few(status.waiting_for, "contribution", "contributions")}` : "collecting contributions",
    agree: status.view > 0 ? `agreeing, try ${count(status.view + 1)}` : "agreeing on what counts",
    apply: "applying what was agreed",
  };
  const paused = status.is_paused ? "; training is paused" : "";
  return `Round ${count(status.round)}: ${what[status.phase]}, ${few(status.held, "contribution", "contributions")} here${paused}.`;
}
