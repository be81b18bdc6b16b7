/* What happened, what is safe, and what the run is made of. */
"use strict";
W5.EVENT_KINDS = { nodes: ["joined", "left", "turned away", "welcome", "rejoined", "back"], trouble: ["failed", "left", "banned", "aside", "bad batch", "undo", "gap", "lost", "expired", "refused", "storage", "insecure", "callback failed"] };

W5.eventList = function () {
  let known = [], kind = "all";
  const list = W5.h("ol", { class: "events", "aria-live": "polite", "aria-relevant": "additions" }), note = W5.h("p", { class: "dim" });
  const choice = W5.choice("which events", [["all", "all"], ["nodes", "nodes"], ["trouble", "trouble"]], "all", (value) => { kind = value; draw(); });
  const element = W5.h("div", {}, W5.h("div", { class: "bar" }, note, W5.h("span", { class: "controls" }, choice)), W5.h("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "events, newest first" }, list));
  const item = ([time, what, text]) => W5.h("li", { class: W5.EVENT_KINDS.trouble.includes(what) ? "trouble" : null }, W5.h("time", {}, W5.clock(time)), W5.h("span", { class: "what" }, what), W5.h("span", {}, text));
  const wanted = (each) => kind === "all" || W5.EVENT_KINDS[kind].includes(each[1]);

  function draw() {
    const shown = known.filter(wanted);
    W5.fill(list, shown.slice().reverse().map(item));
    W5.say(note, shown.length ? "" : "nothing of this kind");
  }
  return {
    element,
    get known() { return known; },
    load(all) { known = all; draw(); },
    add(more) {
      known = known.concat(more).slice(-200);
      list.prepend(...more.filter(wanted).reverse().map(item));
      while (list.children.length > 200) list.lastChild.remove();
      if (list.children.length) W5.say(note, "");
    },
  };
};

/* Steps: on disk, applied, lent. */
W5.safetyBar = function () {
  const parts = ["safe", "applied", "lent"].map((kind) => W5.h("span", { class: `part part-${kind}` }));
  const stack = W5.h("span", { class: "stack wide", role: "img" }, parts), legend = W5.h("p", { class: "readout" });
  const element = W5.h("div", { class: "chart" }, legend, stack);
  return {
    element,
    update(now) {
      if (now.step === undefined) return;
      const lent = now.is_over ? 0 : now.leases, all = Math.max(now.steps_total || 0, now.step + lent, 1);
      const counts = [Math.min(now.durable, now.step), Math.max(0, now.step - now.durable), lent];
      counts.forEach((count, at) => { parts[at].style.width = `${(100 * count) / all}%`; });
      const words = [`${W5.whole(counts[0])} on disk`, `${W5.whole(counts[1])} applied since`, `${W5.whole(lent)} leases under way`];
      stack.setAttribute("aria-label", `steps: ${words.join(", ")}`);
      W5.fill(legend, words.map((text, at) => W5.h("span", { class: `key part-${["safe", "applied", "lent"][at]}` }, text)), now.life > 1 ? W5.h("span", {}, `life ${now.life} of the coordinator`) : null);
    },
  };
};

W5.pairs = (entries) => W5.h("dl", {}, entries.map(([name, value]) => [W5.h("dt", {}, name), W5.h("dd", {}, typeof value === "object" && value !== null ? JSON.stringify(value) : String(value))]));

W5.aboutRun = function () {
  const element = W5.h("div", { class: "about" });
  const fold = (title, isOpen, child) => W5.h("details", { open: isOpen }, W5.h("summary", {}, title), child);
  return {
    element,
    update(about) {
      const settings = Object.entries(about.settings).filter(([, value]) => value !== null).map(([name, value]) => [name.replaceAll("_", "-"), value]);
      const result = Object.entries(about.result).map(([name, value]) => [name === "batches_relent" ? "batches lent again" : name.replaceAll("_", " "), name.startsWith("bytes") ? W5.bytes(value) : name === "seconds" ? W5.duration(value) : typeof value === "number" ? W5.whole(value) : value]);
      const metrics = Object.entries(about.metrics).map(([name, value]) => [name, W5.number(value)]);
      const commands = [["folder", about.folder], ["count it again", `w5xde audit ${about.name}`], ["keep this page", `w5xde show ${about.name} --html ${about.name}.html`]];
      W5.fill(element,
        result.length ? fold("result", true, W5.pairs(result.concat(metrics))) : null,
        fold("run", true, W5.pairs([["job", about.job], ["samples", W5.whole(about.samples)], ...commands])),
        fold("versions", false, W5.pairs(Object.entries(about.versions))),
        fold(`settings (${settings.length})`, false, W5.pairs(settings)));
    },
  };
};
