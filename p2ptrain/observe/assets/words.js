// Numbers and complaints in words that a person reads. Text goes into the page as text only, never as HTML.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const brief = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const TEXT_MAX = 400; // characters of a text that may be a peer's
const NAME_MAX = 60;
const TAIL = 8; // of a peer's id: all begin alike

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

/** Of a round: exact enough to compare. */
export const seconds = (number) => (number < 10 ? number.toFixed(2) : number.toFixed(1));

/** Of a message there and back. */
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

/** {reason: number} as text, the most frequent first. */
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

/** All that is to be said, and the one word for it. */
export function health(status) {
  const told = status.complaints.map(({ severity, title, advice, text }) => ({ severity, title, advice, raw: cut(text) }));
  const worst = GRAVITY[told.reduce((most, each) => Math.max(most, GRAVITY.indexOf(each.severity)), 0)];
  if (told.length === 0) {
    const advice = "It is connected, its disk works, it has the same model as the others, and its work counts.";
    told.push({ severity: "good", title: "Nothing to complain of", advice, raw: "" });
  }
  return { told, state: worst === "info" ? "good" : worst, word: STATES[worst] };
}

// Why a page does not have the rounds that it asked for, or has only those that it was told of since.
const LACKING = {
  coming: "The rounds are on their way.",
  late: "The rounds of before have not come: the line is slow, or the node is busy. This page asks again by itself.",
  here: "No round has been applied here yet. The first shows up when it is done.",
};

export const noRounds = (whether) => LACKING[whether];

/** How many rounds there are to see, and whether there are more. */
export function rounds({ total, stride }, whether) {
  if (total === 0) return { coming: "Rounds on their way.", late: "Rounds not here yet.", here: "No rounds yet." }[whether];
  const merged = stride > 1 ? `; a point is the mean of ${count(stride)}` : "";
  const lacking = whether === "late" ? "; some of before have not come yet, and are asked for again" : "";
  return `${few(total, "round", "rounds")} on this page${merged}${lacking}`;
}

/** Whether all have the same model, as far as this node can know. */
export function agreement(status) {
  const number = status.certified_round;
  if (status.complaints.some(({ code }) => code === "quarantined")) {
    return ["other", "No: this node’s model differs from the certified one. It is fetching that."];
  }
  if (number === 0) return ["unknown", "Not known yet: the roster has certified no round so far."];
  if (!(number in status.roots)) {
    return ["unknown", `The roster has certified round ${count(number)}, which this node cannot compare: it was not here.`];
  }
  if (status.roster.length === 1 && status.roster[0] === status.peer_id) {
    return ["same", `Yes: this node alone has a vote, and signed its own model after round ${count(number)}.`];
  }
  const { liars } = status.fault_tolerance; // a certificate has as many as the liars of a quorum leave (core/roster.py)
  const members = few(status.quorum - liars, "member", "members");
  const but = liars > 0 ? `, and at most ${count(liars)} of them may lie` : "";
  return ["same", `Yes: at least ${members} signed that after round ${count(number)} they had bit for bit the model of this node${but}.`];
}

/** What the node does at this moment. */
export function doing(status) {
  const what = {
    train: `step ${count(status.step)} of training`,
    collect: status.waiting_for > 0 ? `waiting for ${few(status.waiting_for, "contribution", "contributions")}` : "collecting contributions",
    agree: status.view > 0 ? `agreeing, try ${count(status.view + 1)}` : "agreeing on what counts",
    apply: "applying what was agreed",
  };
  const paused = status.is_paused ? "; it pauses" : "";
  return `Round ${count(status.round)}: ${what[status.phase]}, ${few(status.held, "contribution", "contributions")} here${paused}.`;
}
