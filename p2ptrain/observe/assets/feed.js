// What the page shows, by asking the node: its status every second, new rounds when it has applied some, peers and the
// log every few seconds. The page says when there are no answers, so that nobody mistakes old numbers for new ones.

const ASK_MILLISECONDS = 1_000; // between requests for the status
const AWAY_MILLISECONDS = 3_000; // the same, while it does not come
const MORE_MILLISECONDS = 5_000; // between requests for peers, of which hundreds take 100 kB, and for the log
const ANSWER_MILLISECONDS = 8_000; // without a byte; while bytes arrive, a slow connection may take its time
const ROUNDS = [1_000, 1_000, 200, 40]; // to request at most: all that the node remembers, and fewer after failures

async function ask(path) {
  const over = new AbortController();
  let timer = 0;
  const goOn = () => {
    clearTimeout(timer);
    timer = setTimeout(() => over.abort(), ANSWER_MILLISECONDS);
  };
  try {
    goOn();
    const response = await fetch(path, { signal: over.signal, cache: "no-store" });
    const [reader, parts] = [response.body.getReader(), []];
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      goOn();
      parts.push(part.value);
    }
    return { code: response.status, body: JSON.parse(await new Blob(parts).text()) };
  } finally {
    clearTimeout(timer);
  }
}

/** Asks, and returns the answer's body; null if it was refused or did not come. */
async function found(path) {
  try {
    const { code, body } = await ask(path);
    return code === 200 ? body : null;
  } catch {
    return null;
  }
}

export class Feed {
  /** `to` has the callbacks status, rounds, late (rounds could not be loaded), peers, log and state. */
  constructor(to) {
    this.to = to;
    this._isHere = false;
    this._wake = () => {};
    this._shown = { history: "", round: 0 }; // up to which round of which run and branch the page has rounds
    this._isLoading = false; // of rounds
    this._failures = 0;
  }

  start() {
    this._askAgainAndAgain();
    setInterval(() => this._isHere && this._askMore(), MORE_MILLISECONDS);
    const atOnce = () => {
      if (document.hidden) return;
      this._wake();
      if (this._isHere) this._askMore();
    };
    document.addEventListener("visibilitychange", atOnce);
    window.addEventListener("online", atOnce);
  }

  async _askAgainAndAgain() {
    for (;;) {
      const wasHere = this._isHere;
      this._isHere = await this._askStatus();
      if (this._isHere && !wasHere) this._askMore();
      await new Promise((resolve) => {
        this._wake = resolve;
        setTimeout(resolve, this._isHere ? ASK_MILLISECONDS : AWAY_MILLISECONDS);
      });
    }
  }

  /** Returns whether the status came. */
  async _askStatus() {
    try {
      const { code, body } = await ask("/status");
      if (code === 200) {
        this.to.status(body);
        this._askRounds(body);
      }
      this.to.state({ 200: "live", 401: "locked", 500: "failing" }[code] ?? "starting");
      return code === 200;
    } catch {
      this.to.state("away");
      return false;
    }
  }

  /** Requests the rounds applied since the last request that succeeded. */
  async _askRounds(status) {
    const now = { history: `${status.run_id} ${status.branch}`, round: status.applied_round };
    const isSame = now.history === this._shown.history;
    if (this._isLoading || (isSame && now.round === this._shown.round)) return;
    const isLater = isSame && now.round > this._shown.round;
    const most = ROUNDS[Math.min(this._failures, ROUNDS.length - 1)];
    this._isLoading = true;
    const answer = await found(`/rounds?last=${isLater ? Math.min(now.round - this._shown.round, most) : most}`);
    this._isLoading = false;
    if (answer === null) {
      this._failures += 1;
      this.to.late();
      return;
    }
    const newest = answer.rounds.at(-1)?.round;
    if (newest === now.round - 1) now.round = newest; // the node has applied the next one, and not recorded it yet
    [this._shown, this._failures] = [now, 0];
    this.to.rounds(answer.rounds);
  }

  async _askMore() {
    if (document.hidden) return;
    const [peers, log] = await Promise.all([found("/peers"), found("/log")]);
    if (peers !== null) this.to.peers(peers);
    if (log !== null) this.to.log(log.lines);
  }
}
