/* The points of a run's charts, as columns. The server sends at most 2,000; more are merged here in pairs. */
"use strict";
W5.COLUMNS = ["time", "life", "step", "samples", "seconds", "loss", "low", "high", "rate", "durable", "load"];
W5.POINTS_MAX = 4000;

W5.Points = class {
  constructor() {
    this.load({ columns: {}, evaluations: [], lives: [] });
  }

  load(history) {
    this.columns = {};
    for (const name of W5.COLUMNS) this.columns[name] = (history.columns[name] || []).slice();
    this.evaluations = history.evaluations.slice();
    this.lives = history.lives.slice();
  }

  get length() {
    return this.columns.step.length;
  }

  last(name) {
    return this.columns[name][this.length - 1];
  }

  add(row) {
    const [, life, step] = row.point;
    if (this.length && this.last("life") !== life) {
      /* What a crash made void is done again, and drawn anew. */
      this.lives.push([life, step]);
      while (this.length && this.last("step") > step) for (const name of W5.COLUMNS) this.columns[name].pop();
      this.evaluations = this.evaluations.filter((each) => each[0] <= step);
    }
    W5.COLUMNS.forEach((name, at) => this.columns[name].push(row.point[at]));
    const newest = this.evaluations[this.evaluations.length - 1];
    if (row.evaluation && (!newest || newest[0] !== row.evaluation[0])) this.evaluations.push(row.evaluation);
    if (this.length > W5.POINTS_MAX) this.thin();
  }

  thin() {
    const before = this.columns, after = {};
    const mean = (a, b) => (a === null ? b : b === null ? a : (a + b) / 2);
    const least = (a, b) => (a === null ? b : b === null ? a : Math.min(a, b));
    const most = (a, b) => (a === null ? b : b === null ? a : Math.max(a, b));
    const merge = { loss: mean, rate: mean, load: mean, low: least, high: most };
    for (const name of W5.COLUMNS) {
      const join = merge[name] || ((a, b) => b), from = before[name], to = [];
      for (let at = 0; at + 1 < from.length; at += 2) to.push(join(from[at], from[at + 1]));
      if (from.length % 2) to.push(from[from.length - 1]);
      after[name] = to;
    }
    this.columns = after;
  }

  /* The place of the first value that is not less, in a column that never falls. */
  find(name, value) {
    const column = this.columns[name];
    let low = 0, high = column.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (column[middle] < value) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /* The evaluations on the points, for a chart: one value of the first metric, or null, a point. */
  measured() {
    const name = this.metric(), values = new Array(this.length).fill(null);
    for (const [step, metrics] of this.evaluations) {
      const at = Math.min(this.find("step", step), this.length - 1);
      if (at >= 0 && metrics[name] !== undefined) values[at] = metrics[name];
    }
    return values;
  }

  metric() {
    const newest = this.evaluations[this.evaluations.length - 1];
    return newest ? Object.keys(newest[1])[0] : "";
  }
};

/* An exponential mean of a column, which forgets a share of `rest` at each point. */
W5.smooth = function (column, rest) {
  if (!rest) return column;
  let mean = null;
  return column.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : rest * mean + (1 - rest) * value;
    return mean;
  });
};
