// The line to the node: /events as long as it lasts, and again when it has broken. Where too many watch already, the
// page asks every few seconds instead. It says which of these it is, so that nobody takes old numbers for new ones.

const RETRY_MILLISECONDS = [500, 1_000, 2_000, 4_000, 8_000, 15_000];
const ASK_MILLISECONDS = 2_000; // where there is no place at /events
const PEERS_MILLISECONDS = 5_000; // they are no event: hundreds take 100 kB
const SILENT_MILLISECONDS = 20_000; // then it is asked whether it is still there: a node that waits has nothing to say
const LOOK_MILLISECONDS = 5_000;
const ANSWER_MILLISECONDS = 8_000;
const ROUNDS = 1_000; // all that it remembers

async function ask(path) {
  const response = await fetch(path, { signal: AbortSignal.timeout(ANSWER_MILLISECONDS), cache: "no-store" });
  return { code: response.status, body: await response.json() };
}

export class Feed {
  /** `to` has status, rounds, peers, log and state, which are called with what comes. */
  constructor(to) {
    this.to = to;
    this._failures = 0;
    this._source = null;
    this._timer = 0;
    this._heardAt = 0;
    this._early = []; // rounds that come before those that were asked for
  }

  start() {
    this._open();
    setInterval(() => this._look(), LOOK_MILLISECONDS);
    setInterval(() => this._askPeers(), PEERS_MILLISECONDS);
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
    this._early = [];
    const on = (name, handle) =>
      source.addEventListener(name, (event) => {
        this._heardAt = performance.now();
        handle(JSON.parse(event.data));
      });
    on("status", (status) => this.to.status(status));
    on("log", (line) => this.to.log(line));
    on("round", (round) => (this._early === null ? this.to.rounds([round]) : this._early.push(round)));
    source.addEventListener("open", () => this._opened(source));
    source.addEventListener("error", () => this._broke(source));
  }

  async _opened(source) {
    this._heardAt = performance.now();
    this.to.state("live");
    if (!(await this._askAll()) || source !== this._source) return;
    this._failures = 0;
    this.to.rounds(this._early);
    this._early = null;
  }

  /** Rounds and peers: what no event tells again. */
  async _askAll() {
    try {
      const [rounds] = await Promise.all([ask(`/rounds?last=${ROUNDS}`), this._askPeers()]);
      if (rounds.code === 200) this.to.rounds(rounds.body.rounds);
      return rounds.code === 200;
    } catch {
      return false; // the line breaks too, and says so itself
    }
  }

  async _askPeers() {
    if (document.hidden || this._source === null) return;
    try {
      const { code, body } = await ask("/peers");
      if (code === 200) this.to.peers(body);
    } catch {
      // as above
    }
  }

  /** Find out why, and try again: the browser itself gives up when the node says no. */
  async _broke(source) {
    if (source !== this._source) return;
    source.close();
    this._source = null;
    this._failures += 1;
    let wait = RETRY_MILLISECONDS[Math.min(this._failures, RETRY_MILLISECONDS.length) - 1];
    try {
      const { code, body } = await ask("/status");
      if (code === 200) {
        this.to.status(body);
        if (this._failures > 1) {
          this.to.state("asking");
          wait = ASK_MILLISECONDS;
          await this._askAll();
        }
      } else if (code === 401) {
        this.to.state("locked");
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

  /** A node that was stopped, or a laptop that slept, breaks no line. */
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
