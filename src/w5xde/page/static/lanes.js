/* The life of batches: a lane for each node with its leases of the last seconds, and the chain of any one batch. */
"use strict";
W5.LANE_SECONDS = 6;
W5.LANES_MAX = 12;
W5.LANE_HEIGHT = 22;

W5.lanes = function (ask) {
  let lines = [], bars = [];
  const canvas = W5.h("canvas", { role: "img", "aria-label": "leases of the last seconds", onclick: choose });
  const note = W5.h("p", { class: "dim" }), chain = W5.h("ol", { class: "chain", "aria-live": "polite" });
  const epoch = W5.h("input", { type: "number", min: 0, required: true, id: "epoch", inputmode: "numeric" });
  const batch = W5.h("input", { type: "number", min: 0, required: true, id: "batch", inputmode: "numeric" });
  const form = W5.h("form", { class: "controls", onsubmit: (event) => { event.preventDefault(); find(); } },
    W5.h("label", {}, "epoch ", epoch), W5.h("label", {}, "batch ", batch), W5.h("button", { type: "submit" }, "trace it"));
  const legend = W5.h("p", { class: "readout" }, W5.h("span", { class: "key lent" }, "lent"), W5.h("span", { class: "key computed" }, "computing"), W5.h("span", { class: "key failed" }, "not answered"), W5.h("span", { class: "key unneeded" }, "not needed: another was sooner"));
  let isTable = false;
  const tablePlace = W5.h("div", { hidden: true });
  const toggle = W5.toggle("table", "leases: show as a table", (on) => { isTable = on; canvas.hidden = on; tablePlace.hidden = !on; draw(); });
  const element = W5.h("div", { class: "chart" }, W5.h("div", { class: "bar" }, legend, W5.h("span", { class: "controls" }, ask ? form : null, toggle)), canvas, tablePlace, note, chain);
  new ResizeObserver(draw).observe(element);

  function load(all) {
    lines = all;
    draw();
  }
  function add(more) {
    lines = lines.concat(more).slice(-60);
    draw();
  }

  function draw() {
    const leases = lines.flatMap((line) => line.leases), newest = leases.reduce((most, each) => Math.max(most, each.ended), 0);
    const begin = newest - W5.LANE_SECONDS, recent = leases.filter((each) => each.ended > begin);
    element.parentElement && (element.parentElement.hidden = !leases.length);
    const names = [...new Set(recent.map((each) => each.node))].sort().slice(0, W5.LANES_MAX);
    const sent = lines.reduce((sum, line) => sum + line.of, 0);
    const wholly = leases.length >= sent;
    W5.say(note, leases.length ? `The last ${W5.LANE_SECONDS} s. ${wholly ? "Every lease is drawn." : `A sample: ${W5.whole(leases.length)} of ${W5.whole(sent)} leases were followed; the ledger has all of them.`}` : "");
    if (isTable) {
      const rows = recent.slice(-100).reverse().map((each) => [each.node, String(each.epoch), each.first === each.last ? String(each.first) : `${each.first} to ${each.last}`, `${(1000 * (each.ended - each.lent)).toFixed(1)} ms`, `${(1000 * each.compute_seconds).toFixed(1)} ms`, each.outcome]);
      W5.fill(tablePlace, W5.table("leases, newest first", ["node", "epoch", "batches", "lent for", "computed for", "outcome"], rows, [false, true, true, true, true, false]));
      return;
    }
    const width = element.clientWidth, height = names.length * W5.LANE_HEIGHT + 20, ratio = devicePixelRatio;
    if (!width || !names.length) return;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d"), left = Math.min(130, width / 4), scale = (width - left - 8) / W5.LANE_SECONDS;
    context.scale(ratio, ratio);
    context.font = `12px ${W5.style("--font")}`;
    context.textBaseline = "middle";
    const place = (time) => left + Math.max(0, time - begin) * scale;
    bars = [];
    names.forEach((name, at) => {
      const top = at * W5.LANE_HEIGHT;
      context.fillStyle = W5.style("--dim");
      context.fillText(name, 0, top + W5.LANE_HEIGHT / 2, left - 8);
      context.fillStyle = W5.style("--grid");
      context.fillRect(left, top + W5.LANE_HEIGHT - 1, width - left - 8, 1);
      for (const lease of recent.filter((each) => each.node === name)) bar(context, lease, top + 4, place);
    });
    context.fillStyle = W5.style("--dim");
    for (let second = 0; second <= W5.LANE_SECONDS; second += 1) {
      context.textAlign = second === W5.LANE_SECONDS ? "right" : "left";
      context.fillText(second === W5.LANE_SECONDS ? "0 s" : `−${W5.LANE_SECONDS - second}`, left + second * scale, height - 8);
    }
  }

  /* Lent is hollow, computing is solid, and what was not answered is hatched. */
  function bar(context, lease, top, place) {
    const from = place(lease.lent), to = Math.max(place(lease.ended), from + 1.5), height = W5.LANE_HEIGHT - 9;
    const failed = lease.answered === null && lease.outcome !== "not needed";
    context.strokeStyle = context.fillStyle = W5.style(failed ? "--bad" : lease.answered === null ? "--dim" : "--mean");
    context.globalAlpha = 0.75;
    context.strokeRect(from + 0.5, top + 0.5, to - from - 0.5, height);
    if (failed) {
      context.save();
      context.beginPath();
      context.rect(from, top, to - from, height);
      context.clip();
      for (let x = from - height; x < to; x += 5) {
        context.beginPath();
        context.moveTo(x, top + height);
        context.lineTo(x + height, top);
        context.stroke();
      }
      context.restore();
    } else if (lease.answered !== null) {
      const end = place(lease.answered), begin = place(lease.answered - lease.compute_seconds);
      context.fillRect(begin, top, Math.max(1, end - begin), height);
    }
    context.globalAlpha = 1;
    bars.push([from, to, top, top + height, lease]);
  }

  function choose(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const found = bars.find((each) => x >= each[0] - 2 && x <= each[1] + 2 && y >= each[2] && y <= each[3]);
    if (!found || !ask) return;
    epoch.value = found[4].epoch;
    batch.value = found[4].first;
    find();
  }

  function find() {
    ask(Number(epoch.value), Number(batch.value)).then(
      (found) => W5.fill(chain, found.found ? found.chain.map((each) => W5.h("li", {}, W5.h("time", {}, W5.clock(each.time)), ` ${W5.link(each)}`)) : W5.h("li", {}, `Batch ${found.batch} of epoch ${found.epoch}: ${found.why}.`)),
      (error) => W5.fill(chain, W5.h("li", {}, `It cannot be traced: ${error.message}`)));
  }
  return { element, load, add, draw };
};

/* One link of a batch's chain, in words. */
W5.link = function (each) {
  const why = each.reason ? ` (${each.reason})` : "";
  if (each.what === "lent") return `lent to ${each.node}`;
  if (each.what === "applied") return `answered by ${each.node}, and applied in step ${W5.whole(each.step)}`;
  if (each.what === "safe") return `survives a crash: in the checkpoint of ${W5.whole(each.version)} steps`;
  return `${each.what} at ${each.node}${why}`;
};
