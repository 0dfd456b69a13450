// The connection to the node: /events, reopened when it breaks. If too many clients are watching, the page polls every
// few seconds instead. The page says which of these applies, so that nobody mistakes old numbers for new ones.

const RETRY_MILLISECONDS = [500, 1_000, 2_000, 4_000, 8_000, 15_000];
const ASK_MILLISECONDS = 2_000; // between polls, if /events is full
const PEERS_MILLISECONDS = 5_000; // peers are polled: hundreds of them take 100 kB
const SILENT_MILLISECONDS = 20_000; // before checking that the node is alive: a waiting node sends no events
const LOOK_MILLISECONDS = 5_000;
const ANSWER_MILLISECONDS = 8_000; // without a byte; while bytes arrive, a slow connection may take its time
const ROUNDS = [1_000, 1_000, 200, 40]; // to request: all that the node remembers, and fewer after failures
const EARLY_MAX = 1_000; // new rounds kept until the requested ones arrive, which include older ones

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

const paused = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const retry = (failures) => RETRY_MILLISECONDS[Math.min(failures, RETRY_MILLISECONDS.length) - 1];

/** Joins the requested rounds with those from events, which overlap, in order. */
function joined(asked, told) {
  const isFirst = (each) => each.branch === asked[0]?.branch && each.round === asked[0].round;
  return told.some(isFirst) ? [...told, ...asked] : [...asked, ...told];
}

export class Feed {
  /** `to` has the callbacks status, rounds, peers, log and state. `whole` gets the earlier rounds with those since;
   * `late` is called if they could not be loaded yet. */
  constructor(to) {
    this.to = to;
    this._failures = 0;
    this._source = null;
    this._timer = 0;
    this._heardAt = 0;
    this._early = []; // new rounds until the requested ones arrive; null after that
    this._isLate = false; // the requested rounds are late: new ones are shown without them
  }

  start() {
    this._open();
    setInterval(() => this._look(), LOOK_MILLISECONDS);
    setInterval(() => this._source !== null && this._askPeers(), PEERS_MILLISECONDS);
    const atOnce = () => {
      if (document.hidden) return;
      if (this._source === null) this._open();
      else this._askPeers();
    };
    document.addEventListener("visibilitychange", atOnce);
    window.addEventListener("online", atOnce);
  }

  _open() {
    clearTimeout(this._timer);
    this._source?.close();
    const source = new EventSource("/events");
    this._source = source;
    [this._early, this._isLate] = [[], false];
    const on = (name, handle) =>
      source.addEventListener(name, (event) => {
        this._heardAt = performance.now();
        handle(JSON.parse(event.data));
      });
    on("status", (status) => this.to.status(status));
    on("log", (line) => this.to.log(line));
    on("round", (round) => this._hearRound(round));
    source.addEventListener("open", () => this._opened(source));
    source.addEventListener("error", () => this._broke(source));
  }

  async _opened(source) {
    this._heardAt = performance.now();
    this.to.state("live");
    this._askPeers();
    for (let time = 1; !(await this._askRounds(time, source)); time += 1) {
      if (source === this._source) await paused(retry(time));
      if (source !== this._source) return;
    }
    this._failures = 0;
  }

  _hearRound(round) {
    if (this._early === null || this._isLate) this.to.rounds([round]);
    this._early?.push(round);
    if (this._early?.length > EARLY_MAX) this._early.shift();
  }

  /** Requests the earlier rounds, which events do not repeat; returns whether they arrived. They may fail while the
   * event stream keeps working. `source` is the stream they are for, or null when polling. */
  async _askRounds(time, source) {
    let found = null;
    try {
      const { code, body } = await ask(`/rounds?last=${ROUNDS[Math.min(time, ROUNDS.length) - 1]}`);
      if (code === 200) found = body.rounds;
    } catch {
      // they count as late
    }
    if (source !== this._source) return false;
    if (found === null) {
      this.to.late();
      if (!this._isLate) this.to.rounds(this._early);
      this._isLate = true;
      return false;
    }
    this.to.whole(joined(found, this._early));
    [this._early, this._isLate] = [source === null ? [] : null, false];
    return true;
  }

  async _askPeers() {
    if (document.hidden) return;
    try {
      const { code, body } = await ask("/peers");
      if (code === 200) this.to.peers(body);
    } catch {
      // retried soon
    }
  }

  /** Finds out why the stream broke, and retries: the browser gives up when the node refuses. */
  async _broke(source) {
    if (source !== this._source) return;
    source.close();
    this._source = null;
    [this._early, this._isLate] = [[], false];
    this._failures += 1;
    let wait = retry(this._failures);
    try {
      const { code, body } = await ask("/status");
      if (code === 200) {
        this.to.status(body);
        if (this._failures > 1) {
          this.to.state("asking");
          wait = ASK_MILLISECONDS;
          await Promise.all([this._askRounds(1, null), this._askPeers()]);
        }
      } else if (code === 401) {
        this.to.state("locked");
      } else if (code === 500) {
        this.to.state("failing");
      } else {
        this.to.state("starting");
        wait = Math.min(wait, 2_000);
      }
    } catch {
      this.to.state("away");
    }
    clearTimeout(this._timer);
    if (this._source === null) this._timer = setTimeout(() => this._open(), wait);
  }

  /** Checks a silent connection: a stopped node or a sleeping laptop does not close it. */
  async _look() {
    const source = this._source;
    if (source === null || source.readyState !== EventSource.OPEN) return;
    if (performance.now() - this._heardAt < SILENT_MILLISECONDS) return;
    try {
      await ask("/healthz");
      this._heardAt = performance.now();
    } catch {
      this._broke(source);
    }
  }
}
