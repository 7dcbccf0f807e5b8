// Two line charts over steps. What is no finite number is a gap in the line.

import { short } from "./dom.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// There is no half step to mark.
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

export class Chart {
  constructor(place, label, digits) {
    this.place = place;
    this.label = label;
    this.digits = digits;
    place.setAttribute("role", "img");
    this.data = [[], []];
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(place);
  }

  size() { return { width: Math.max(200, this.place.clientWidth), height: 210 }; }

  draw(steps, values) {
    this.data = [steps, values.map((value) => (Number.isFinite(value) ? value : null))];
    if (this.plot) this.plot.setData(this.data);
    else this.build();
    this.describe();
  }

  build() {
    this.plot?.destroy();
    const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
    this.plot = new uPlot({
      ...this.size(),
      scales: { x: { time: false } },
      axes: [{ ...axis, incrs: WHOLE }, { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => short(tick, this.digits)) }],
      series: [
        { label: "step", value: (plot, value) => value ?? plot.data[0].at(-1) ?? "–" },
        { label: this.label, stroke: css("--accent"), width: 2, points: { show: false },
          value: (plot, value) => short(value ?? plot.data[1].at(-1), 4) },
      ],
    }, this.data, this.place);
  }

  // What is drawn, in words, for whoever cannot see it.
  describe() {
    const [steps, values] = this.data;
    const known = values.filter((value) => value !== null);
    this.place.setAttribute("aria-label", known.length === 0 ? `${this.label}: nothing yet` : `${this.label} from step ${steps[0]} to ` +
      `${steps.at(-1)}: first ${short(known[0], 4)}, last ${short(known.at(-1), 4)}, ` +
      `lowest ${short(known.reduce((a, b) => Math.min(a, b)), 4)}, highest ${short(known.reduce((a, b) => Math.max(a, b)), 4)}`);
  }

  retint() { if (this.plot) this.build(); }
}
