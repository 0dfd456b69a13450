// The exported page of a run: its rounds are embedded as data, and nothing is requested.

import { Charts } from "./charts.js";
import { History } from "./history.js";
import { unpacked } from "./packed.js";
import { showCaptions, showRounds } from "./panels.js";

async function show() {
  const { contribution_tokens: contributionTokens } = JSON.parse(document.getElementById("exported").textContent);
  const history = new History();
  for (const round of await unpacked(document.getElementById("rounds-packed")).json()) history.add(round);
  const charts = new Charts(history, { contributionTokens });
  showRounds(history, "here");
  showCaptions(history, contributionTokens);
  charts.start();
  document.getElementById("main").dataset.round = String(history.points.at(-1)?.last ?? "");
}

show();
