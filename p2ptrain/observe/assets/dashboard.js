// The dashboard: keeps what the node answers, and renders it once per frame.

import { Charts } from "./charts.js";
import { Feed } from "./feed.js";
import { showFigures } from "./figures.js";
import { History } from "./history.js";
import { Log, at, say, showAgenda, showCaptions, showHead, showHealth, showLearning, showMine, showNow, showPeers, showRanks, showRoot, showRoster, showRounds, showTraffic } from "./panels.js";
import * as words from "./words.js";

const BANNERS = {
  live: "",
  starting: "The node is starting: it is looking for its run, or loading it. This page continues by itself.",
  locked: "The node requires its token. Open this page once with ?token=… at the end of its address.",
  failing: "The node could not answer; its log says why. The page shows old data, and keeps trying.",
  away: "The node does not answer. The page shows old data, and continues when the node is back.",
};
const PILLS = { starting: "Starting", locked: "Locked", failing: "Failing", away: "Away" };

const history = new History();
const facts = { contributionTokens: 0 };
const charts = new Charts(history, facts);
const log = new Log();
let status = null;
let statusAt = 0; // by the page's clock
let runId = "";
let state = "";
let whether = "coming"; // the requested rounds: here, coming, or late
let isDue = false;

function show() {
  isDue = false;
  if (status === null) return;
  for (const part of [showFigures, showHead, showNow, showAgenda, showLearning, showMine, showRanks, showRoot, showRoster, showTraffic]) part(status);
  if (!(state in PILLS)) showHealth(status);
  showRounds(history, whether);
  showCaptions(history, facts.contributionTokens);
  tick();
  at("main").dataset.round = String(status.applied_round);
}

function due() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(show);
}

/** Updates the times that only show time passing. */
function tick() {
  if (status === null) return;
  const since = state === "away" ? 0 : (performance.now() - statusAt) / 1_000;
  say("uptime", words.duration(status.uptime_seconds + since));
  const applied = status.since_applied_seconds;
  say("since", applied === null ? "none since the start" : `the last ${words.duration(applied + since)} ago`);
}

function turn(next) {
  if (next === state) return;
  state = next;
  say("banner", BANNERS[next]);
  at("banner").classList.toggle("shown", BANNERS[next] !== "");
  document.body.classList.toggle("old", ["away", "failing", "locked"].includes(next));
  if (next in PILLS) {
    at("state").dataset.state = "warning";
    say("state-text", PILLS[next]);
  }
  due();
}

const feed = new Feed({
  state: turn,
  log: (lines) => lines.forEach((line) => log.add(line)),
  peers: showPeers,
  status(now) {
    if (runId !== "" && runId !== now.run_id) history.clear(); // another run at the same address
    [status, statusAt, runId] = [now, performance.now(), now.run_id];
    facts.contributionTokens = now.contribution_tokens;
    due();
  },
  late() {
    whether = "late";
    due();
  },
  rounds(found) {
    whether = "here";
    if (found.map((round) => history.add(round)).some(Boolean)) charts.changed();
    due();
  },
});

feed.start();
setInterval(tick, 1_000);
// Numbers first: the chart library takes longer than everything else.
requestAnimationFrame(() => setTimeout(() => charts.start(), 250));
