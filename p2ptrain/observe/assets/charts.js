// The charts, drawn by plotly. Because the library is large, it is loaded after everything else, when a chart comes into
// view. Only visible charts are drawn, one at a time and rarely: the CPU is busy training a model.

import { OF_ROUND, withoutPlace } from "./figures.js";
import { unpacked } from "./packed.js";

const DRAW_MILLISECONDS = 2_000; // between two drawings
const LOADS = "Loading the chart library …";
const FAILED = "The chart library could not be loaded.";
const LIBRARY = "/assets/plotly.min.js";
const CONFIG = { displayModeBar: false, scrollZoom: false, doubleClick: false, showTips: false };

const mean = (sum, number) => (number > 0 ? sum / number : null);
const meanOf = (name) => (point) => mean(point.sums[name], point.counts[name]);
const meanLoss = meanOf("loss");
const perSecond = (name) => (point) => mean(point.sums[name], point.sums.seconds);

/** Bytes moved up to each point, in both directions. */
function moved(points) {
  let sum = 0;
  return points.map((point) => (sum += point.sums.bytes_sent + point.sums.bytes_received));
}

const rounds = (points) => points.map((point) => point.last);

function line(colours, colour, title, x, y, unit, more = {}) {
  const drawn = { color: colours[colour], width: 2, ...more.line };
  const hovertemplate = `${title} %{y:,.4~g} ${unit}<extra></extra>`;
  const mode = x.length === 1 ? "markers" : "lines";
  return { type: "scatter", name: title, x, y, ...more, mode, line: drawn, marker: { color: drawn.color }, hovertemplate };
}

const DASHED = { line: { dash: "6px,4px" } };
const DOTTED = { line: { dash: "2px,3px" } };

/** The tokens behind the contributions of rounds; records of early releases do not say. */
const swarmTokens = (sums, contributionTokens) => sums.swarm_tokens || sums.contributors * contributionTokens;

// Charts by the name of their place in the page: the lines, and settings of the axes.
const CHARTS = {
  learning: (points, colours) => {
    const measured = points.filter((point) => point.counts.held_out_loss > 0);
    return [
      [
        line(colours, "collect", "training loss of the swarm", rounds(points), points.map(meanOf("swarm_loss")), "nats", DASHED),
        line(colours, "train", "held-out loss", rounds(measured), measured.map(meanOf("held_out_loss")), "nats"),
      ],
      {},
    ];
  },
  loss: (points, colours) => [[line(colours, "train", "loss", rounds(points), points.map(meanLoss), "nats")], {}],
  bytes: (points, colours) => [
    [line(colours, "apply", "loss", moved(points), points.map(meanLoss), "nats")],
    { xaxis: { tickformat: "~s", ticksuffix: "B", hoverformat: ".4~s" } },
  ],
  phases: (points, colours) => [
    ["train", "collect", "agree", "apply"].map((phase) =>
      line(colours, phase, phase, rounds(points), points.map(meanOf(`${phase}_seconds`)), "s", {
        stackgroup: "one",
        fillcolor: `${colours[phase]}59`,
        line: { width: 1 },
      }),
    ),
    { yaxis: { ticksuffix: " s" } },
  ],
  speed: (points, colours, facts) => [
    [
      line(colours, "collect", "the swarm", rounds(points),
        points.map((point) => mean(swarmTokens(point.sums, facts.contributionTokens), point.sums.seconds)), "tokens/s", DASHED),
      line(colours, "train", "this node", rounds(points), points.map(perSecond("tokens")), "tokens/s"),
    ],
    { yaxis: { tickformat: "~s" } },
  ],
  bandwidth: (points, colours) => [
    [
      line(colours, "train", "sent", rounds(points), points.map(perSecond("bytes_sent")), "B/s"),
      line(colours, "collect", "received", rounds(points), points.map(perSecond("bytes_received")), "B/s", DASHED),
    ],
    { yaxis: { tickformat: "~s", ticksuffix: "B/s" } },
  ],
  taken: (points, colours) => [
    [
      line(colours, "apply", "taken", rounds(points), points.map(meanOf("contributors")), "a round"),
      line(colours, "collect", "too late", rounds(points), points.map(meanOf("late")), "a round", DASHED),
      line(colours, "bad", "refused", rounds(points), points.map(meanOf("refused")), "a round", DOTTED),
    ],
    {},
  ],
};

/** Adds a chart for each figure of a round that has no fixed place in the page. */
function makeOthers() {
  for (const { name, title, unit } of withoutPlace(OF_ROUND, "data-round-figures")) {
    const made = document.getElementById("chart-template").content.cloneNode(true);
    for (const [part, id] of [["h3", `h-${name}`], [".plot", `chart-${name}`], ["figcaption", `c-${name}`]]) {
      made.querySelector(part).id = id;
    }
    made.querySelector("h3").textContent = `${title[0].toUpperCase()}${title.slice(1)}${unit ? `, ${unit}` : ""}`;
    made.querySelector(".chart").setAttribute("aria-labelledby", `h-${name}`);
    made.querySelector(".chart").setAttribute("aria-describedby", `c-${name}`);
    made.querySelector("figure").dataset.other = name;
    document.getElementById("charts").append(made);
    CHARTS[name] = (points, colours) => [
      [line(colours, "train", title, rounds(points), points.map(meanOf(name)), unit)],
      { yaxis: { tickformat: "~s" } },
    ];
  }
}

const FROM_ZERO = ["phases", "speed", "bandwidth", "taken"];

function colours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["text", "soft", "line", "card", "train", "collect", "agree", "apply", "bad"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

function layout(own, name, found, width, height) {
  const axis = {
    gridcolor: found.line,
    linecolor: found.line,
    zeroline: false,
    fixedrange: true,
    automargin: false,
    nticks: 5,
    tickfont: { size: 12, color: found.soft },
  };
  return {
    width,
    height,
    margin: { l: 52, r: 8, t: 8, b: 26 },
    paper_bgcolor: found.card,
    plot_bgcolor: found.card,
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: found.text },
    showlegend: false,
    dragmode: false,
    hovermode: "x unified",
    hoverlabel: { bgcolor: found.card, bordercolor: found.line, font: { color: found.text } },
    xaxis: { ...axis, showgrid: false, ...own.xaxis },
    yaxis: { ...axis, ...(FROM_ZERO.includes(name) ? { rangemode: "tozero" } : {}), ...own.yaxis },
  };
}

/** Returns the library's URL: the node's, or an object URL if the page contains the library. */
async function library() {
  const packed = document.getElementById("library");
  if (packed === null) return LIBRARY;
  return URL.createObjectURL(new Blob([await unpacked(packed).arrayBuffer()], { type: "text/javascript" }));
}

async function load() {
  const source = await library();
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = source;
    script.async = true;
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", reject);
    document.head.append(script);
  });
}

const idle = () =>
  new Promise((resolve) => (window.requestIdleCallback ? requestIdleCallback(resolve, { timeout: 1_000 }) : setTimeout(resolve, 50)));

export class Charts {
  constructor(history, facts) {
    this.history = history;
    this.facts = facts;
    this._plotly = null;
    this._isAsked = false; // whether the library was requested
    makeOthers();
    this._places = new Map(Object.keys(CHARTS).map((name) => [document.getElementById(`chart-${name}`), name]));
    this._say(LOADS);
    this._seen = new Set();
    this._due = new Set();
    this._isDrawing = false;
    this._drawnAt = -Infinity;
    this._watcher = new IntersectionObserver((entries) => this._look(entries), { rootMargin: "100px" });
    this._sizes = new ResizeObserver(() => this.changed());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.changed());
    document.addEventListener("visibilitychange", () => this._draw());
  }

  /** Starts drawing charts as they come into view. */
  start() {
    for (const place of this._places.keys()) {
      this._watcher.observe(place);
      this._sizes.observe(place);
    }
  }

  /** Shows a text in each frame until its chart is drawn. */
  _say(text) {
    for (const place of this._places.keys()) place.parentElement.dataset.state = text;
  }

  async _load() {
    this._isAsked = true;
    try {
      this._plotly = await load();
    } catch {
      this._plotly = null; // the captions below the charts have the numbers
    }
    const isReady = this._plotly !== null;
    document.documentElement.dataset.charts = isReady ? "ready" : "failed";
    this._say(isReady ? "" : FAILED);
    this.changed();
  }

  /** Marks all charts to be drawn again. */
  changed() {
    for (const place of this._places.keys()) this._due.add(place);
    this._draw();
  }

  _look(entries) {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) this._seen.add(target);
      else this._seen.delete(target);
    }
    if (this._seen.size > 0 && !this._isAsked) this._load();
    this._draw();
  }

  async _draw() {
    if (this._isDrawing || this._plotly === null) return;
    this._isDrawing = true;
    try {
      for (let place = this._next(); place !== undefined; place = this._next()) {
        const wait = this._drawnAt + DRAW_MILLISECONDS - performance.now();
        if (wait > 0 && place.dataset.points !== undefined) await new Promise((resolve) => setTimeout(resolve, wait));
        await this._drawAll();
      }
    } finally {
      this._isDrawing = false;
    }
  }

  _next() {
    if (document.hidden || this.history.points.length === 0) return undefined;
    return [...this._due].find((place) => this._seen.has(place) && place.clientWidth > 0);
  }

  /** Draws the visible charts that are due, one after the other, so that the page stays responsive. */
  async _drawAll() {
    const found = colours();
    for (const place of [...this._due].filter((each) => this._seen.has(each) && each.clientWidth > 0)) {
      await idle();
      this._due.delete(place);
      const name = this._places.get(place);
      const { points } = this.history;
      const [lines, own] = CHARTS[name](points, found, this.facts);
      await this._plotly.react(place, lines, layout(own, name, found, place.clientWidth, place.clientHeight), CONFIG);
      document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true"); // where plotly measures text
      place.dataset.points = String(points.length);
      place.dataset.last = String(points.at(-1)?.last ?? "");
    }
    this._drawnAt = performance.now();
  }
}
