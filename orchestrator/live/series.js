// The steps of one job that the page has seen, and what can be said of the last of them.

import { number } from "./dom.js";

const KEPT = 5000;
const RECENT = 50;

export class Series {
  constructor() { this.points = []; this.attempt = null; this.after = null; }

  get last() { return this.points.at(-1); }

  // Where to begin to ask: a job with many steps is shown from near its end.
  cursor(step) {
    if (this.after === null) this.after = Math.max(0, step - KEPT);
    return this.after;
  }

  // A step that not all ranks have reported yet is asked for again: its sums would be of some ranks only.
  add(page, ranks) {
    let whole = page.points.length;
    while (whole && page.points[whole - 1].ranks < ranks) whole -= 1;
    const points = page.points.slice(0, whole).map((point) => ({ ...point, attempt: page.attempt }));
    if (page.attempt === null) return 0;
    if (page.attempt !== this.attempt) {
      // Another attempt goes on from a checkpoint: what it does anew replaces what was.
      if (this.attempt !== null) { this.after = 0; this.attempt = page.attempt; return -1; }
      this.attempt = page.attempt;
    }
    const first = points[0]?.step;
    if (first !== undefined && this.last && this.last.step >= first) {
      this.points = this.points.filter((point) => point.step < first);
    }
    this.points.push(...points);
    if (this.points.length > KEPT) this.points.splice(0, this.points.length - KEPT);
    this.after = points.at(-1)?.step ?? this.after;
    return points.length;
  }

  get steps() { return this.points.map((point) => point.step); }

  get losses() { return this.points.map((point) => number(point.loss)); }

  // Tokens of all ranks over the time of the step; totals start anew with an attempt.
  get speeds() {
    return this.points.map((point, index) => {
      const before = index ? this.points[index - 1].tokens : null;
      const tokens = before !== null && point.tokens > before ? point.tokens - before : NaN;
      return tokens / point.step_seconds;
    });
  }

  // What the last steps alone did: totals now less totals then.
  recent() {
    const now = this.last;
    if (!now) return null;
    const candidates = this.points.slice(-RECENT - 1);
    const then = candidates.find((point) => point.tokens < now.tokens && point.ranks === now.ranks) ?? null;
    const before = (list, same) => (then ? list(then).find(same) : undefined);
    const comm = now.comm.map((part) => {
      const old = before((p) => p.comm, (each) => each.route === part.route && each.phase === part.phase);
      return {
        route: part.route, phase: part.phase, seconds: part.seconds - (old?.seconds ?? 0),
        exposed: part.exposed_seconds - (old?.exposed_seconds ?? 0), bytes: part.payload_bytes - (old?.payload_bytes ?? 0),
      };
    });
    return { comm, steps: then ? now.step - then.step : now.step };
  }

  // What was launched since the step before the last one: counted, not configured.
  launchedNow() {
    const now = this.last;
    if (!now) return [];
    const then = this.points.at(-2);
    const same = (part) => then?.ns.find((each) => each.kernel === part.kernel && each.algorithm === part.algorithm);
    const restarted = !then || then.tokens >= now.tokens;
    return now.ns
      .map((part) => ({ ...part, launches: part.launches - (restarted ? 0 : same(part)?.launches ?? 0) }))
      .filter((part) => part.launches > 0);
  }
}

export function overlapOf(parts) {
  const seconds = parts.reduce((sum, part) => sum + part.seconds, 0);
  const exposed = parts.reduce((sum, part) => sum + part.exposed, 0);
  return { seconds, exposed, share: seconds > 0 ? 1 - exposed / seconds : null };
}
