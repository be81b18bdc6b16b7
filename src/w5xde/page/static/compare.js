/* Several runs: their losses in one chart, the settings in which they differ, and whether their weights are the same. */
"use strict";
W5.DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 2], [1, 3], [12, 4], [6, 2, 2, 2]];

W5.comparison = function (names) {
  let runs = [];
  const colours = ["--mean", "--metric", "--rate", "--c4", "--c5", "--c6", "--c7", "--c8"];
  const chart = new W5.Chart("loss of each run", draw, rows, (self) => [W5.choice("below the chart", [["step", "steps"], ["samples", "samples"], ["seconds", "time"]], "step", (axis) => { self.axis = axis; self.rebuild(); })]);
  const badge = W5.h("p", { class: "badge" }), table = W5.h("div");
  const element = W5.h("div", {}, badge, chart.element, table);
  chart.describe = () => runs.map((run, at) => W5.h("span", { class: `key run-${at}` }, `${run.about.name} ${W5.number(run.history.columns.loss.at(-1))}`));

  function draw(self, width) {
    const base = W5.chartOptions(width, W5.CHART_HEIGHT);
    const tables = runs.map((run) => [run.history.columns[self.axis], run.history.columns.loss]);
    const data = tables.length && tables.some((each) => each[0].length) ? uPlot.join(tables.map(distinct)) : [[]];
    const options = Object.assign(base, {
      scales: { x: { time: false } },
      series: [{}, ...runs.map((run, at) => ({ stroke: W5.style(colours[at]), width: 1.8, dash: W5.DASHES[at], spanGaps: true, points: { show: false } }))],
      axes: [W5.xAxis(self, base), base.axis({ size: 52, values: (plot, values) => values.map(W5.number) })],
    });
    return { options, data };
  }
  /* A joined chart needs one value for each x. */
  function distinct([xs, ys]) {
    const last = new Map();
    xs.forEach((x, at) => last.set(x, ys[at]));
    const sorted = [...last].sort((a, b) => a[0] - b[0]);
    return [sorted.map((each) => each[0]), sorted.map((each) => each[1])];
  }
  function rows() {
    return ["runs", ["run", "steps", "loss"], runs.map((run) => [run.about.name, W5.whole(run.history.columns.step.at(-1)), W5.number(run.history.columns.loss.at(-1))])];
  }

  function differing() {
    const keys = new Set(runs.flatMap((run) => Object.keys(run.about.settings)));
    const text = (run, key) => JSON.stringify(run.about.settings[key] ?? null);
    return [...keys].filter((key) => !["name", "resume", "log", "json", "page"].includes(key) && new Set(runs.map((run) => text(run, key))).size > 1);
  }

  return {
    element, chart,
    load(found) {
      runs = found;
      const hashes = runs.map((run) => run.about.result.weights_sha256), keys = differing();
      const same = hashes.every((each) => each && each === hashes[0]);
      badge.className = same ? "badge same" : "badge";
      W5.say(badge, same ? `same bits: all ${runs.length} runs have the weights sha256 ${hashes[0].slice(0, 16)}…` : hashes.every(Boolean) ? `other bits${keys.length ? `: they differ in ${keys[0].replaceAll("_", "-")}` : ""}` : "not all of them are finished");
      const results = [...new Set(runs.flatMap((run) => Object.keys(run.about.metrics)))];
      const lines = [...keys.map((key) => [key.replaceAll("_", "-"), ...runs.map((run) => String(run.about.settings[key] ?? "–"))]),
        ...results.map((name) => [name, ...runs.map((run) => W5.number(run.about.metrics[name]))]),
        ["seconds", ...runs.map((run) => W5.number(run.about.result.seconds))],
        ["weights", ...runs.map((run) => (run.about.result.weights_sha256 || "–").slice(0, 12))]];
      W5.fill(table, W5.table("settings in which the runs differ, and their results", ["setting or result", ...runs.map((run) => run.about.name)], lines, ["", ...runs].map((each, at) => at > 0)));
      chart.rebuild();
    },
  };
};
