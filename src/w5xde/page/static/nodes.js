/* The nodes: where the time of each goes, and a table that can be sorted and filtered. */
"use strict";
W5.PARTS = [["compute", "computing"], ["codec", "encoding"], ["network", "sending"], ["wait", "waiting"]];
W5.BARS_MAX = 10;
W5.ROWS_MAX = 200;

/* One bar a node: the shares of its time. Words and patterns beside the colours. */
W5.timeBars = function () {
  const list = W5.h("ul", { class: "bars" }), more = W5.h("p", { class: "dim" });
  const tablePlace = W5.h("div", { hidden: true }), legend = W5.h("p", { class: "readout" }, W5.PARTS.map(([kind, word]) => W5.h("span", { class: `key part-${kind}` }, word)));
  let isTable = false, known = [];
  const toggle = W5.toggle("table", "time of each node: show as a table", (on) => {
    isTable = on;
    list.hidden = more.hidden = on;
    tablePlace.hidden = !on;
    update(known);
  });
  const element = W5.h("div", { class: "chart" }, W5.h("div", { class: "bar" }, legend, W5.h("span", { class: "controls" }, toggle)), list, more, tablePlace);

  function update(nodes) {
    known = nodes;
    const working = nodes.filter(([, node]) => node.state === "working" && node.shares.some((share) => share > 0));
    if (isTable) {
      const rows = working.map(([name, node]) => [name, ...node.shares.map(W5.percent)]);
      W5.fill(tablePlace, W5.table("shares of each node's time", ["node", ...W5.PARTS.map((part) => part[1])], rows, [false, true, true, true, true]));
      return;
    }
    /* Those that wait most come first: they are the ones to look at. */
    working.sort((a, b) => a[1].shares[0] - b[1].shares[0]);
    W5.fill(list, working.slice(0, W5.BARS_MAX).map(([name, node]) => W5.h("li", {},
      W5.h("span", { class: "name" }, name),
      bar(name, node.shares),
      W5.h("span", { class: "n" }, W5.percent(node.shares[0])))));
    W5.say(more, working.length > W5.BARS_MAX ? `and ${working.length - W5.BARS_MAX} more, which compute more of their time` : working.length || W5.isOver ? "" : "no node works at this moment");
  }

  function bar(name, shares) {
    const words = W5.PARTS.map(([, word], at) => `${word} ${W5.percent(shares[at])}`).join(", ");
    const parts = W5.PARTS.map(([kind], at) => {
      const part = W5.h("span", { class: `part part-${kind}` });
      part.style.width = `${100 * shares[at]}%`;
      return part;
    });
    return W5.h("span", { class: "stack", role: "img", "aria-label": `${name}: ${words}`, title: words }, parts);
  }
  return { element, update };
};

W5.linkText = (node) => (node.link_down || node.link_up ? `${W5.mega(node.link_down)} / ${W5.mega(node.link_up)}` : "–");
W5.codecText = (node) => (node.codec_down === "none" && node.codec_up === "none" ? "none" : `${node.codec_down} / ${node.codec_up}`);

/* A node of a run that is over does nothing any more. */
W5.isOver = false;
W5.stateText = (node) => (W5.isOver && node.state === "working" ? "done" : node.state);

/* [key, title, text, value to sort by, is a number] */
W5.NODE_COLUMNS = [
  ["name", "node", (name) => name, (name) => name, false],
  ["device", "device", (name, node) => node.device || "–", (name, node) => node.device, false],
  ["state", "state", (name, node) => W5.stateText(node), (name, node) => node.state, false],
  ["rate", "batches/s", (name, node) => (node.state === "gone" ? "–" : W5.number(node.batches_per_second)), (name, node) => -node.batches_per_second, true],
  ["share", "share", (name, node, all) => W5.percent(all ? node.batches / all : 0), (name, node) => -node.batches, true],
  ["link", "↓ / ↑ MB/s", (name, node) => W5.linkText(node), (name, node) => -(node.link_down || 0), true],
  ["rtt", "RTT ms", (name, node) => W5.number(node.round_trip_ms), (name, node) => -(node.round_trip_ms || 0), true],
  ["codec", "codec ↓ / ↑", (name, node) => W5.codecText(node), (name, node) => W5.codecText(node), false],
  ["trust", "faults", (name, node) => W5.whole(node.faults), (name, node) => -node.faults, true],
];

W5.nodesTable = function () {
  let sorted = "share", isReversed = false, words = "", isWhole = false, known = [];
  const heads = W5.NODE_COLUMNS.map(([key, title, , , numeric]) => W5.h("th", { scope: "col", class: numeric ? "n" : null },
    W5.h("button", { type: "button", onclick: () => { isReversed = sorted === key && !isReversed; sorted = key; update(known); } }, title)));
  const body = W5.h("tbody"), note = W5.h("p", { class: "dim" });
  const filter = W5.h("input", { type: "search", id: "filter", placeholder: "filter nodes  /", "aria-label": "filter nodes", oninput: () => { words = filter.value.toLowerCase(); update(known); } });
  const all = W5.h("button", { type: "button", hidden: true, onclick: () => { isWhole = true; update(known); } }, "show all");
  const bar = W5.h("div", { class: "bar" }, note, W5.h("span", { class: "controls" }, filter, all));
  const element = W5.h("div", { class: "nodes" }, bar,
    W5.h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "nodes" },
      W5.h("table", { class: "cards" }, W5.h("caption", { class: "hidden" }, "nodes of the run"), W5.h("thead", {}, W5.h("tr", {}, heads)), body)));

  function update(nodes) {
    known = nodes;
    const total = nodes.reduce((sum, each) => sum + each[1].batches, 0);
    const column = W5.NODE_COLUMNS.find((each) => each[0] === sorted);
    heads.forEach((head, at) => head.setAttribute("aria-sort", W5.NODE_COLUMNS[at][0] !== sorted ? "none" : isReversed ? "descending" : "ascending"));
    const wanted = nodes.filter(([name, node]) => !words || `${name} ${node.machine} ${node.state} ${node.device}`.toLowerCase().includes(words));
    const value = (each) => column[3](each[0], each[1]);
    wanted.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : a[0] < b[0] ? -1 : 1) * (isReversed ? -1 : 1));
    /* Those that have left stand below the others. */
    wanted.sort((a, b) => (a[1].state === "gone") - (b[1].state === "gone"));
    const shown = isWhole ? wanted : wanted.slice(0, W5.ROWS_MAX);
    const selected = document.getSelection();
    if (!selected || selected.isCollapsed || !body.contains(selected.anchorNode)) W5.fill(body, shown.map(([name, node]) => row(name, node, total)));
    all.hidden = shown.length === wanted.length;
    bar.hidden = filter.hidden = nodes.length < 9;
    W5.say(note, shown.length < nodes.length ? `${shown.length} of ${nodes.length} nodes` : "");
  }

  function row(name, node, total) {
    return W5.h("tr", { class: `is-${["working", "gone", "done"].includes(W5.stateText(node)) ? W5.stateText(node) : "other"}` }, W5.NODE_COLUMNS.map(([key, title, text, , numeric]) => {
      const shown = text(name, node, total);
      if (key === "state") return W5.h("td", { "data-label": title }, W5.h("span", { class: "state" }, shown));
      if (key === "codec" && node.codec_reason) return W5.h("td", { "data-label": title, title: node.codec_reason }, shown);
      return W5.h("td", { "data-label": title, class: numeric ? (key === "trust" && node.faults ? "n bad" : "n") : null }, shown);
    }));
  }
  return { element, update, filter };
};
