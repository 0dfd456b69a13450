// The rounds that the page has seen, in bounded memory. When there are too many points, neighbours are merged, so that a
// point stands for two rounds, then four, and so on. The newest rounds are also kept unmerged, for the table.

import { OF_ROUND, numberOf } from "./figures.js";

export const POINTS_MAX = 300; // in a chart, which has about as many pixels
export const RECENT_MAX = 8;
const KEYS_MAX = 2_000; // of known rounds: /rounds returns a thousand

/** A point: the sum of each figure, and the number of rounds that have it. */
function pointOf(round) {
  const [sums, counts] = [{}, {}];
  for (const figure of OF_ROUND) {
    const number = numberOf(figure, round);
    [sums[figure.name], counts[figure.name]] = number === null ? [0, 0] : [number, 1];
  }
  return { last: round.round, rounds: 1, sums, counts };
}

const added = (one, other) => Object.fromEntries(Object.keys(one).map((key) => [key, one[key] + other[key]]));

function merged(one, other) {
  return {
    last: other.last,
    rounds: one.rounds + other.rounds,
    sums: added(one.sums, other.sums),
    counts: added(one.counts, other.counts),
  };
}

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.points = [];
    this.recent = []; // the newest first
    this.total = 0;
    this.stride = 1; // rounds per point
    this.lowest = null; // the lowest loss
    this._keys = new Set();
  }

  /** Adds a round; returns whether it was new. */
  add(round) {
    const key = `${round.branch} ${round.round}`;
    if (this._keys.has(key)) return false;
    this._keys.add(key);
    if (this._keys.size > KEYS_MAX) this._keys.delete(this._keys.values().next().value);
    this.total += 1;
    if (round.loss !== null && (this.lowest === null || round.loss < this.lowest.loss)) {
      this.lowest = { loss: round.loss, round: round.round };
    }
    const contributors = round.contributors.length ?? round.contributors; // an exported page has their number
    this.recent.unshift({ ...round, contributors });
    this.recent.length = Math.min(this.recent.length, RECENT_MAX);
    this._push(pointOf(round));
    return true;
  }

  _push(point) {
    const newest = this.points.at(-1);
    if (newest !== undefined && newest.rounds < this.stride) {
      this.points[this.points.length - 1] = merged(newest, point);
      return;
    }
    this.points.push(point);
    if (this.points.length <= POINTS_MAX) return;
    this.stride *= 2;
    const half = [];
    for (let n = 0; n < this.points.length; n += 2) {
      half.push(n + 1 < this.points.length ? merged(this.points[n], this.points[n + 1]) : this.points[n]);
    }
    this.points = half;
  }
}
