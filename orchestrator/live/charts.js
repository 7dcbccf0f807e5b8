// Two line charts over steps. What is no finite number is a gap in the line.

import { short } from "./dom.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Chart {
  constructor(place, label, digits) {
    this.place = place;
    this.label = label;
    this.digits = digits;
    this.data = [[], []];
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(place);
  }

  size() { return { width: Math.max(200, this.place.clientWidth), height: 210 }; }

  draw(steps, values) {
    this.data = [steps, values.map((value) => (Number.isFinite(value) ? value : null))];
    if (this.plot) this.plot.setData(this.data);
    else this.build();
  }

  build() {
    this.plot?.destroy();
    const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
    this.plot = new uPlot({
      ...this.size(),
      scales: { x: { time: false } },
      axes: [axis, { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => short(tick, this.digits)) }],
      series: [
        { label: "step" },
        { label: this.label, stroke: css("--accent"), width: 2, points: { show: false },
          value: (_, value) => short(value, 4) },
      ],
    }, this.data, this.place);
  }

  retint() { if (this.plot) this.build(); }
}
