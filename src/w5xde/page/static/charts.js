/* Charts over steps, samples or time, each with a table behind it. */
"use strict";
W5.CHART_HEIGHT = 230;
W5.MARKS_MAX = 60;
W5.MARKS = { joined: "▲", left: "▼", checkpoint: "■" };

/* What all charts share: axes, grid, cursor. */
W5.chartOptions = function (width, height) {
  const ink = W5.style("--dim"), grid = { stroke: W5.style("--grid"), width: 1 }, font = `12px ${W5.style("--font")}`;
  const axis = (more) => Object.assign({ stroke: ink, grid, ticks: { show: false }, font, gap: 6 }, more);
  return {
    width, height, axis,
    legend: { show: false },
    padding: [10, 16, 0, 0],
    cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false } },
  };
};

/* A chart with controls, a line of values, and a table. `draw(kind, width)` returns options and data. */
W5.Chart = class {
  constructor(label, draw, rows, controls) {
    this.draw = draw;
    this.rows = rows;
    this.plot = null;
    this.axis = "step";
    this.place = W5.h("div", { class: "plot", role: "img", "aria-label": label });
    this.readout = W5.h("p", { class: "readout" });
    this.tablePlace = W5.h("div", { hidden: true });
    const table = W5.toggle("table", `${label}: show as a table`, (on) => {
      this.isTable = on;
      this.place.hidden = on;
      this.tablePlace.hidden = !on;
      this.update();
    });
    this.element = W5.h("div", { class: "chart" }, W5.h("div", { class: "bar" }, this.readout, W5.h("span", { class: "controls" }, controls ? controls(this) : null, table)), this.place, this.tablePlace);
    new ResizeObserver(() => this.resize()).observe(this.element);
  }

  /* What stands below the chart: the x of the points. */
  x(points) {
    const time = points.columns.time, begin = time.length ? time[0] : 0;
    return this.axis === "time" ? time.map((each) => each - begin) : points.columns[this.axis];
  }

  label(sentence) {
    this.place.setAttribute("aria-label", sentence);
  }

  resize() {
    const width = this.place.clientWidth;
    if (this.plot && width) this.plot.setSize({ width, height: W5.CHART_HEIGHT });
    else this.update();
  }

  /* Draw with other options: another axis, another colour scheme. */
  rebuild() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.update();
  }

  update() {
    if (this.isTable) {
      const [caption, names, rows] = this.rows(this);
      W5.fill(this.tablePlace, W5.table(caption, names, rows, names.map(() => true)));
      return;
    }
    const width = this.place.clientWidth;
    if (!width) return;
    const { options, data } = this.draw(this, width);
    if (!data[0].length) return;
    if (!this.plot) this.plot = new uPlot(options, data, this.place);
    else if (!this.isZoomed()) this.plot.setData(data);
    else this.plot.setData(data, false);
    this.tell(this.plot);
  }

  isZoomed() {
    const x = this.plot.scales.x, data = this.plot.data[0];
    return x.min > data[0] || x.max < this.zoomed;
  }

  /* Say the values at the cursor, or the newest. */
  tell(plot) {
    const at = plot.cursor.idx ?? plot.data[0].length - 1;
    this.zoomed = plot.data[0][plot.data[0].length - 1];
    if (this.describe) W5.fill(this.readout, this.describe(at));
  }
};

W5.xText = function (axis, value) {
  return axis === "time" ? W5.duration(value) : `${axis === "step" ? "step" : "sample"} ${W5.whole(value)}`;
};
W5.xAxis = function (chart, base) {
  return base.axis({
    values: (plot, values) => values.map((value) => (chart.axis === "time" ? W5.duration(value).replace(".0 s", " s") : W5.short(value))),
    space: 70, size: 30,
  });
};
W5.short = (value) => (value >= 1e6 ? `${+(value / 1e6).toFixed(2)} M` : value >= 1e4 ? `${+(value / 1e3).toFixed(1)} k` : String(+value.toFixed(2)));

W5.key = (kind, text) => W5.h("span", { class: `key ${kind}` }, text);

/* The loss: mean, band from least to most, evaluations, and what happened. */
W5.lossChart = function (points, events) {
  let rest = 0, isLog = false;
  const chart = new W5.Chart("loss", draw, rows, (self) => [
    W5.choice("below the chart", [["step", "steps"], ["samples", "samples"], ["time", "time"]], "step", (axis) => { self.axis = axis; self.rebuild(); }),
    W5.toggle("log", "log scale", (on) => { isLog = on; self.rebuild(); }),
    W5.h("label", { class: "slide" }, "smooth", W5.h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, oninput: (event) => { rest = Number(event.target.value); self.update(); } })),
  ]);
  chart.describe = (at) => {
    const { loss } = points.columns, [xs, , low, high] = chart.plot.data, x = xs[at];
    const found = [W5.h("b", {}, W5.xText(chart.axis, x)), W5.key("mean", `loss ${W5.number(loss[at])}`), W5.key("band", `${W5.number(low[at])} to ${W5.number(high[at])}`)];
    const measured = chart.plot.data[4];
    let newest = at;
    while (newest > 0 && measured[newest] === null) newest -= 1;
    if (measured[newest] !== null && measured[newest] !== undefined) found.push(W5.key("metric", `${points.metric()} ${W5.number(measured[newest])}`));
    return found;
  };

  function draw(self, width) {
    const base = W5.chartOptions(width, W5.CHART_HEIGHT), mean = W5.style("--mean"), metric = W5.style("--metric");
    const { loss, low, high } = points.columns, positive = (column) => (isLog ? column.map((each) => (each > 0 ? each : null)) : column);
    const band = W5.trailing(points, low, high);
    const data = [self.x(points), positive(W5.smooth(loss, rest)), positive(band.low), positive(band.high), points.measured()];
    const options = Object.assign(base, {
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 }, metric: {} },
      series: [
        {},
        { stroke: mean, width: 2, points: { show: false } },
        { stroke: null, points: { show: false } },
        { stroke: null, points: { show: false } },
        { stroke: metric, width: 1.5, dash: [6, 4], scale: "metric", spanGaps: true, points: { show: true, size: 6, fill: metric } },
      ],
      bands: [{ series: [3, 2], fill: W5.style("--band") }],
      axes: [W5.xAxis(self, base), base.axis({ size: 52, values: (plot, values) => values.map((each) => (each === null ? "" : W5.number(each))) }),
        base.axis({ side: 1, scale: "metric", grid: { show: false }, size: 46, stroke: metric, values: (plot, values) => values.map(W5.number), show: points.evaluations.length > 0 })],
      hooks: { setCursor: [(plot) => self.tell(plot)], draw: [(plot) => W5.drawMarks(plot, self, points, events())] },
    });
    if (self.hadMetric !== undefined && self.hadMetric !== points.evaluations.length > 0 && self.plot) {
      self.plot.destroy();
      self.plot = null;
    }
    self.hadMetric = points.evaluations.length > 0;
    return { options, data };
  }

  function rows(self) {
    const { step, loss, low, high } = points.columns, measured = points.measured();
    const every = Math.max(1, Math.ceil(points.length / 100)), found = [];
    for (let at = points.length - 1; at >= 0; at -= every) found.push([W5.whole(step[at]), W5.number(loss[at]), W5.number(low[at]), W5.number(high[at])]);
    for (const [at, metrics] of points.evaluations.slice(-20).reverse()) found.push([W5.whole(at), `${Object.entries(metrics).map(([name, value]) => `${name} ${W5.number(value)}`).join(", ")}`, "", ""]);
    return ["loss by step, newest first; then evaluations", ["step", "loss", "least", "most"], found, measured];
  }
  return chart;
};

/* The band of the steps that a mean stands for: it is one over about so many steps, and a row may have fewer. */
W5.MEAN_STEPS = 20;
W5.trailing = function (points, low, high) {
  const { step, loss } = points.columns, found = { low: [], high: [] };
  let from = 0;
  for (let at = 0; at < step.length; at += 1) {
    while (from < at && step[from] < step[at] - W5.MEAN_STEPS) from += 1;
    let least = low[at], most = high[at];
    for (let back = from; back < at; back += 1) {
      if (low[back] !== null && (least === null || low[back] < least)) least = low[back];
      if (high[back] !== null && (most === null || high[back] > most)) most = high[back];
    }
    found.low.push(least === null || loss[at] === null ? least : Math.min(least, loss[at]));
    found.high.push(most === null || loss[at] === null ? most : Math.max(most, loss[at]));
  }
  return found;
};

/* Marks below the curve: nodes that came and went, checkpoints; and a line where a life of the coordinator began. */
W5.drawMarks = function (plot, chart, points, events) {
  const context = plot.ctx, ratio = devicePixelRatio, xs = plot.data[0];
  context.save();
  context.fillStyle = context.strokeStyle = W5.style("--dim");
  context.font = `${10 * ratio}px ${W5.style("--font")}`;
  context.textAlign = "center";
  const bottom = plot.bbox.top + plot.bbox.height - 4 * ratio, right = plot.bbox.left + plot.bbox.width;
  const inside = (x) => x >= plot.bbox.left && x <= right;
  for (const [time, kind] of events.filter((each) => W5.MARKS[each[1]]).slice(-W5.MARKS_MAX)) {
    const at = points.find("time", time);
    const x = at < xs.length ? plot.valToPos(xs[at], "x", true) : -1;
    if (inside(x)) context.fillText(W5.MARKS[kind], x, bottom);
  }
  context.setLineDash([2 * ratio, 3 * ratio]);
  for (const [life, step] of points.lives) {
    const at = points.find("step", step), x = at < xs.length ? plot.valToPos(xs[at], "x", true) : -1;
    if (!inside(x)) continue;
    context.beginPath();
    context.moveTo(x, plot.bbox.top);
    context.lineTo(x, plot.bbox.top + plot.bbox.height);
    context.stroke();
    context.fillText(`life ${life}`, x, plot.bbox.top + 10 * ratio);
  }
  context.restore();
};

/* Samples a second. */
W5.speedChart = function (points) {
  const chart = new W5.Chart("samples a second", draw, rows, null);
  chart.describe = (at) => [W5.h("b", {}, W5.xText(chart.axis, chart.plot.data[0][at])), W5.key("rate", `${W5.whole(points.columns.rate[at])} samples/s`)];
  chart.axis = "time";

  function draw(self, width) {
    const base = W5.chartOptions(width, W5.CHART_HEIGHT), rate = W5.style("--rate");
    const options = Object.assign(base, {
      scales: { x: { time: false }, y: { range: (plot, least, most) => [0, (most || 1) * 1.1] } },
      series: [{}, { stroke: rate, fill: W5.style("--rate-fill"), width: 1.5, points: { show: false } }],
      axes: [W5.xAxis(self, base), base.axis({ size: 52, values: (plot, values) => values.map(W5.short) })],
      hooks: { setCursor: [(plot) => self.tell(plot)] },
    });
    return { options, data: [self.x(points), points.columns.rate] };
  }

  function rows(self) {
    const x = self.x(points), every = Math.max(1, Math.ceil(points.length / 100)), found = [];
    for (let at = points.length - 1; at >= 0; at -= every) found.push([W5.duration(x[at]), W5.whole(points.columns.rate[at]), W5.percent(points.columns.load[at])]);
    return ["samples a second by time, newest first", ["time", "samples/s", "coordinator's load"], found];
  }
  return chart;
};
