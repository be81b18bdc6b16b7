/* The pool as a star: the coordinator in the middle, machines around it in the order in which they came. */
"use strict";
W5.STAR_MACHINES = 24;
W5.STAR_LABELS = 12;
/* Machines are numbers to the run; people know them by their nodes. */
W5.stem = (members) => (members.length > 1 || /^local-/.test(members[0][0]) ? members[0][0].replace(/-\d+$/, "") : members[0][0]);

W5.star = function () {
  const svg = W5.h("svg", { viewBox: "0 0 360 300", role: "img", "aria-label": "the pool" });
  const note = W5.h("p", { class: "dim" });
  const element = W5.h("div", { class: "star" }, svg, note);
  /* The place of a machine stays when another one leaves. */
  const places = new Map();

  function update(nodes) {
    const machines = new Map();
    for (const [name, node] of nodes) {
      const machine = node.machine || name;
      if (!machines.has(machine)) machines.set(machine, []);
      machines.get(machine).push([name, node]);
      if (!places.has(machine)) places.set(machine, places.size);
    }
    const shown = [...machines].sort((a, b) => places.get(a[0]) - places.get(b[0])).slice(0, W5.STAR_MACHINES);
    /* One or two machines stand beside the model. */
    const isFlat = shown.length < 3, count = Math.max(shown.length, 2), middle = [180, isFlat ? 70 : 150];
    svg.setAttribute("viewBox", isFlat ? "0 0 360 140" : "0 0 360 300");
    W5.fill(svg, W5.h("title", {}, `${machines.size} machines, ${nodes.length} nodes`));
    shown.forEach(([machine, members], at) => {
      const angle = (2 * Math.PI * at) / count - (isFlat ? 0 : Math.PI / 2);
      const place = [middle[0] + 118 * Math.cos(angle), middle[1] + 100 * Math.sin(angle)];
      const working = members.filter((each) => each[1].state === "working");
      const link = members.reduce((sum, each) => sum + (each[1].link_down || 0) + (each[1].link_up || 0), 0);
      const isGone = !working.length, rates = working.reduce((sum, each) => sum + each[1].batches_per_second, 0);
      const width = isGone ? 1 : 1.2 + Math.min(4, Math.log10(1 + link / 1e5));
      W5.put(svg,
        W5.h("line", { x1: middle[0], y1: middle[1], x2: place[0], y2: place[1], class: isGone ? "ray gone" : "ray", "stroke-width": width.toFixed(1) }),
        W5.h("g", { class: isGone ? "machine gone" : "machine" },
          W5.h("circle", { cx: place[0], cy: place[1], r: Math.min(20, 8 + 2 * Math.sqrt(members.length)) }),
          W5.h("text", { x: place[0], y: place[1] + 4, class: "count" }, isGone ? "✕" : working.length),
          shown.length > W5.STAR_LABELS ? null : W5.h("text", { x: place[0], y: place[1] + (Math.sin(angle) > 0.4 ? 34 : -24), class: "label" }, short(W5.stem(members))),
          W5.h("title", {}, `${W5.stem(members)}: ${working.length} of ${members.length} nodes work, ${W5.number(rates)} batches/s`)));
    });
    W5.put(svg, W5.h("circle", { cx: middle[0], cy: middle[1], r: 24, class: "hub" }), W5.h("text", { x: middle[0], y: middle[1] + 4, class: "hub-text" }, "model"));
    const words = `${machines.size} machine${machines.size === 1 ? "" : "s"}, ${nodes.filter((each) => each[1].state === "working").length} nodes ${W5.isOver ? "helped" : "at work"}`;
    svg.setAttribute("aria-label", words);
    W5.say(note, machines.size > W5.STAR_MACHINES ? `${words}; the first ${W5.STAR_MACHINES} are drawn` : `${words}; the wider a line, the faster its link`);
  }

  const short = (text) => (text.length > 16 ? `${text.slice(0, 15)}…` : text);
  return { element, update };
};
