// The parts of the page. Each renders the node's answers as text, and updates only what has changed.

import { OF_ROUND, full, numberOf, write } from "./figures.js";
import * as words from "./words.js";

const ROSTER_MAX = 64; // members shown
const PEERS_MAX = 256; // rows shown
const LINES_MAX = 200; // log lines shown

export const at = (id) => document.getElementById(id);

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

export function say(id, text) {
  const element = at(id);
  if (element.textContent !== text) element.textContent = text;
}

/** Replaces the children, unless they are unchanged, so that a reader's selection survives. */
function fill(parent, key, elements) {
  if (parent.dataset.shown === key) return;
  parent.dataset.shown = key;
  parent.replaceChildren(...elements());
}

// ---------------------------------------------------------------------------------------------------
// The status

export function showHead(status) {
  say("run-name", words.name(status.run_name));
  document.title = `${words.name(status.run_name)} · p2ptrain`;
  say("me", words.peer(status.peer_id));
  at("me").title = words.cut(status.peer_id);
  say("device", status.device);
  say("release", words.name(status.release));
  at("own-data").hidden = !status.own_data;
  say("own-data", `Training data: ${status.own_data}.`);
  at("unaudited").hidden = !status.unaudited;
  say("unaudited", `Nobody can tell whether members train: ${words.cut(status.unaudited ?? "", 200)}.`);
}

export function showNow(status) {
  for (const each of at("phases").children) {
    if (each.dataset.phase === status.phase) each.setAttribute("aria-current", "step");
    else each.removeAttribute("aria-current");
  }
  say("doing", words.doing(status));
}

export function showHealth(status) {
  const { told, state, word } = words.health(status);
  at("state").dataset.state = state;
  say("state-text", word);
  fill(at("health"), JSON.stringify(told), () =>
    told.map(({ severity, title, advice, raw }) => {
      const item = make("li");
      item.dataset.severity = severity;
      item.append(make("b", "", title), make("span", "", advice));
      if (raw) item.append(make("span", "raw", raw));
      return item;
    }),
  );
}

/** Lists what members have moved and decided, as `p2ptrain agenda` does in more words. */
export function showAgenda({ motions, successor }) {
  const items = [...motions, ...(successor ? [successor] : [])];
  at("agenda-card").hidden = items.length === 0;
  fill(at("agenda"), JSON.stringify(items), () =>
    items.slice(0, ROSTER_MAX).map((each) => {
      const { title, advice } = words.motion(each, each === successor);
      const item = make("li");
      item.dataset.severity = each.is_mine ? "good" : "warning";
      item.append(make("b", "", title), make("span", "", advice), make("span", "raw", `p2ptrain assent ${each.motion.slice(0, 8)}`));
      return item;
    }),
  );
}

export function showLearning(status) {
  const measured = status.held_out_round;
  say("held-out-of", measured === null ? "not measured yet" : `nats a token, after round ${words.count(measured)}`);
  at("text-card").hidden = status.text === "";
  say("text", words.cut(status.text));
  say("text-of", `Sampled here from the agreed weights after round ${words.count(status.text_round)}.`);
}

export function showRanks({ ranks }) {
  at("ranks-card").hidden = ranks.length === 0;
  fill(at("ranks"), JSON.stringify(ranks), () =>
    ranks.slice(0, ROSTER_MAX).map((each) => {
      const item = make("li");
      const speed = each.seconds > 0 ? `${words.short(each.tokens / each.seconds)} tokens/s, ` : "";
      item.append(make("b", "", each.device), make("span", "", `${speed}${words.bytes(each.memory_bytes)}`));
      return item;
    }),
  );
}

export function showMine({ mine }) {
  const joules = mine.energy_joules ?? null; // only if the device measures it
  say("energy", joules === null ? "not reported" : words.energy(joules));
}

export function showRoot(status) {
  const { verdict, text } = status.same_model;
  at("agreement").dataset.verdict = verdict;
  say("agreement", text);
  say("state-root", status.state_root || "none yet");
}

export function showRoster(status) {
  const { roster } = status;
  say("my-seat", status.is_member ? "has a vote" : status.is_admitted ? "may contribute" : "not admitted yet");
  const here = new Set(status.peers);
  const seats = roster.slice(0, ROSTER_MAX).map((id) => [id, id === status.peer_id ? "me" : here.has(id) ? "" : "gone"]);
  fill(at("roster"), JSON.stringify([seats, roster.length]), () => {
    const items = seats.map(([id, kind]) => {
      const note = { me: " (this node)", gone: " (not connected)", "": "" }[kind];
      const item = make("li", kind, words.peer(id) + note);
      item.title = words.cut(id);
      return item;
    });
    if (roster.length > ROSTER_MAX) items.push(make("li", "more", `and ${words.count(roster.length - ROSTER_MAX)} more`));
    return items;
  });
}

export function showTraffic(status) {
  const rows = Object.entries(status.traffic).filter(([, { sent, received }]) => sent + received > 0);
  fill(at("traffic").tBodies[0], JSON.stringify(rows), () =>
    rows.map(([purpose, { sent, received }]) => {
      const row = make("tr");
      const head = make("th", "", purpose);
      head.scope = "row";
      row.append(head, make("td", "number", words.bytes(sent)), make("td", "number", words.bytes(received)));
      return row;
    }),
  );
  const limit = (rate) => (rate === 0 ? "no limit" : `at most ${words.bytes(rate)}/s`);
  const { upload_bytes_per_second: up, download_bytes_per_second: down } = status.limits;
  say("limits", `The owner’s limits: upload ${limit(up)}, download ${limit(down)}.`);
}

// ---------------------------------------------------------------------------------------------------
// Peers

function standing(peer) {
  const tags = [];
  if (peer.ban) tags.push(["tag bad", `banned: ${words.cut(peer.ban)}`]);
  if (peer.is_greylisted) tags.push(["tag bad", "kept away"]);
  if (peer.is_member) tags.push(["tag member", "votes"]);
  else if (peer.is_admitted) tags.push(["tag", "contributes"]);
  else tags.push(["tag", "guest"]);
  if (peer.standing === "on trial") tags.push(["tag", "on trial"]);
  if (peer.standing === "suspended" || peer.standing === "expelled") tags.push(["tag bad", peer.standing]);
  if (peer.muted) tags.push(["tag bad", `may not audit until after round ${words.count(peer.muted)}`]);
  if (!peer.is_connected) tags.push(["tag", "not connected"]);
  const said = [peer.standing, "kept away"]; // by the tags above
  for (const reason of peer.reasons) if (!said.includes(reason)) tags.push(["tag bad", reason]);
  return tags.map(([kind, text]) => make("span", kind, text));
}

function cell(kind, text, why = "") {
  const found = make("td", kind, text);
  if (why) found.append(make("span", "why", why));
  return found;
}

/** The last value, and the moving average below it. */
function averaged(last, mean, written) {
  return last === null || mean === null ? cell("number wide", words.NONE) : cell("number wide", written(last), `mean ${written(mean)}`);
}

function rowOf(peer) {
  const row = make("tr");
  const head = make("th");
  head.scope = "row";
  const id = make("bdi", "", words.peer(peer.peer_id));
  id.title = words.cut(peer.peer_id);
  head.append(id);
  const place = make("td");
  place.append(...standing(peer));
  const kind = cell("wide", { relay: "a relay", unknown: "not known", name: "a host name" }[peer.address_kind] ?? `a ${peer.address_kind} address`);
  kind.title = words.cut(peer.addresses[0] ?? "", 200);
  const refused = Object.values(peer.refused).reduce((sum, each) => sum + each, 0);
  const points = peer.points < 0.005 ? "clean" : `${peer.points.toFixed(2)} points`;
  row.append(
    head, place, kind,
    cell("number wide", peer.latency_seconds === null ? words.NONE : words.delay(peer.latency_seconds)),
    averaged(peer.tokens_per_second, peer.tokens_per_second_mean, words.short),
    averaged(peer.arrival_seconds, peer.arrival_seconds_mean, (number) => `${words.seconds(number)} s`),
    averaged(peer.staleness, peer.staleness_mean, (number) => write(number, "")),
    cell("number wide", words.count(peer.offered)),
    cell("number wide", words.count(peer.applied), peer.is_admitted ? `${peer.taken_lately} of the last ${peer.rounds_lately}` : ""),
    cell("number wide", words.count(peer.late)),
    cell("", refused === 0 ? "none" : words.count(refused), words.reasons(peer.refused)),
    cell("", points, words.reasons(peer.observed)),
  );
  return row;
}

/** The swarm's concerns: what costs the run most. */
function showConcerns(concerns) {
  at("concerns").hidden = concerns.length === 0;
  fill(at("concerns"), JSON.stringify(concerns), () =>
    concerns.map(({ text, advice }) => {
      const item = make("li");
      item.dataset.severity = "warning";
      item.append(make("b", "", words.cut(text)), make("span", "", advice));
      return item;
    }),
  );
}

/** Lists the nodes in the order of the answer: those to look at come first. */
export function showPeers({ peers, concerns }) {
  showConcerns(concerns);
  const shown = peers.slice(0, PEERS_MAX);
  const body = at("peers").tBodies[0];
  const known = new Map([...body.rows].map((row) => [row.dataset.peer, row]));
  const rows = shown.map((peer) => {
    const facts = JSON.stringify(peer);
    const before = known.get(peer.peer_id);
    if (before?.dataset.facts === facts) return before;
    const row = rowOf(peer);
    Object.assign(row.dataset, { peer: peer.peer_id, facts });
    return row;
  });
  if (rows.length !== body.rows.length || rows.some((row, n) => row !== body.rows[n])) body.replaceChildren(...rows);
  at("peers").hidden = rows.length === 0;
  at("peers-empty").hidden = rows.length > 0;
  const rest = peers.length - shown.length;
  const connected = peers.filter((peer) => peer.is_connected).length;
  const beyond = rest > 0 ? `; ${words.count(rest)} more are at /peers` : "";
  say("peers-note", peers.length === 0 ? "" : `${words.count(connected)} connected, ${words.count(peers.length)} known${beyond}`);
}

// ---------------------------------------------------------------------------------------------------
// Rounds

/** `whether` the requested rounds are "here", "coming", or "late". */
export function showRounds(history, whether) {
  const { recent } = history;
  fill(at("rounds").tBodies[0], recent.map((each) => `${each.branch} ${each.round}`).join(), () =>
    recent.map((each) => {
      const row = make("tr");
      const head = make("th", "number", words.count(each.round));
      head.scope = "row";
      row.append(
        head,
        make("td", "number", each.loss === null ? words.NONE : words.loss(each.loss)),
        make("td", "number", words.seconds(each.seconds)),
        make("td", "number", words.count(each.contributors)),
        make("td", "", each.mine_taken.length > 0 ? "taken" : "not taken"),
        make("td", "number wide", words.count(each.views)),
        make("td", "root wide", words.digest(each.root)),
      );
      return row;
    }),
  );
  at("rounds").hidden = recent.length === 0;
  at("rounds-empty").hidden = recent.length > 0;
  say("rounds-empty", words.noRounds(whether));
  say("shown", words.rounds(history, whether));
}

/** Describes the charts in words. */
export function showCaptions(history, contributionTokens) {
  const { points, recent, lowest, total } = history;
  const [newest] = recent;
  if (newest === undefined) return;
  const measured = recent.find((each) => each.held_out_loss !== null);
  const heldOut = measured === undefined
    ? "Not measured in the last rounds."
    : `${words.loss(measured.held_out_loss)} on held-out text after round ${words.count(measured.held_out_round)}, a perplexity of ${write(measured.perplexity, "")}.`;
  say("c-learning", newest.swarm_loss === null ? heldOut : `${heldOut} The swarm’s training in round ${words.count(newest.round)}: ${words.loss(newest.swarm_loss)}.`);
  const latest = recent.find((each) => each.loss !== null);
  const losses = latest === undefined
    ? "This node trained nothing in these rounds."
    : `${words.loss(latest.loss)} in round ${words.count(latest.round)}; the lowest is ${words.loss(lowest.loss)}, in round ${words.count(lowest.round)}.`;
  say("c-loss", losses);
  const sum = points.reduce((all, { sums }) => all + sums.bytes_sent + sums.bytes_received, 0);
  say("c-bytes", `${words.bytes(sum)} sent and received in ${words.few(total, "round", "rounds")}, ${words.bytes(sum / total)} each.`);
  const phases = ["train", "collect", "agree", "apply"].map((phase) => `${phase} ${words.seconds(newest[`${phase}_seconds`])} s`);
  say("c-phases", `Round ${words.count(newest.round)}: ${phases.join(", ")}.`);
  const rate = (amount) => (newest.seconds > 0 ? amount / newest.seconds : 0);
  const [mine, all] = [rate(newest.tokens), rate(newest.swarm_tokens || newest.contributors * contributionTokens)];
  say("c-speed", `Round ${words.count(newest.round)}, waiting included: this node ${words.short(mine)}, the swarm ${words.short(all)}.`);
  say("c-bandwidth", `Round ${words.count(newest.round)}: ${words.bytes(rate(newest.bytes_sent))}/s sent, ${words.bytes(rate(newest.bytes_received))}/s received.`);
  const refused = words.reasons(newest.refused);
  say("c-taken", `Round ${words.count(newest.round)}: ${words.count(newest.contributors)} taken, ${words.count(newest.late)} too late, ${refused ? `refused: ${refused}` : "none refused"}.`);
  for (const { dataset } of document.querySelectorAll("[data-other]")) {
    const figure = OF_ROUND.find((each) => each.name === dataset.other);
    say(`c-${figure.name}`, `Round ${words.count(newest.round)}: ${full(numberOf(figure, newest), figure.unit)}.`);
  }
}

// ---------------------------------------------------------------------------------------------------
// The log

export class Log {
  constructor() {
    this._keys = new Set(); // of the lines shown, most of which are in the next answer as well
  }

  add({ at: when, level, message }) {
    const key = `${when} ${message}`;
    if (this._keys.has(key)) return;
    this._keys.add(key);
    const item = make("li");
    item.dataset.level = level;
    const time = make("time", "", new Date(when).toLocaleTimeString("en-GB"));
    time.dateTime = when;
    const text = make("span");
    if (level !== "info" && level !== "debug") text.append(make("span", "level", `${level}: `));
    text.append(make("bdi", "", words.cut(message)));
    item.append(time, text);
    at("log").prepend(item);
    at("log-empty").hidden = true;
    if (at("log").childElementCount > LINES_MAX) {
      at("log").lastElementChild.remove();
      this._keys.delete(this._keys.values().next().value);
    }
  }
}
