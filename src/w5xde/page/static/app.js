/* The page: puts its parts together, and shows what comes. */
"use strict";
W5.start = function () {
  const h = W5.h, root = document.getElementById("page"), points = new W5.Points(), nodes = new Map();
  let about = null, now = null, heardAt = 0;
  const title = h("h1", {}, "w5xde"), pill = h("span", { class: "pill" }), progress = h("div", { class: "progress", role: "progressbar", "aria-label": "progress", "aria-valuemin": 0, "aria-valuemax": 100 }, h("span"));
  const facts = h("p", { class: "facts" }), age = h("span", { class: "age" }), banner = h("p", { class: "banner", role: "status", hidden: true });
  const sentences = [0, 1, 2, 3].map(() => h("p", { class: "sentence" }));

  const events = W5.eventList(), loss = W5.lossChart(points, () => events.known), speed = W5.speedChart(points), bars = W5.timeBars();
  const table = W5.nodesTable(), star = W5.star(), safety = W5.safetyBar(), run = W5.aboutRun();
  const report = document.getElementById("data"), stored = report ? JSON.parse(report.textContent) : null;
  const connection = stored ? null : new W5.Connection(heard, lost);
  const lanes = W5.lanes(connection ? (epoch, batch) => connection.json(`/api/runs/0/batches/${epoch}/${batch}`) : null);
  let comparison = null;

  const questions = ["Is it learning?", "Is it fast?", "Who helps?", "Is anything lost?"];
  const question = (at, ...children) => {
    const panel = W5.panel(`q${at + 1}`, questions[at], sentences[at], children);
    panel.classList.add("question");
    return panel;
  };
  const compared = h("div");
  W5.fill(root,
    h("header", {}, h("div", { class: "top" }, title, pill, facts, age), progress),
    h("main", {}, banner, compared,
      question(0, loss.element),
      question(1, h("div", { class: "two" }, speed.element, bars.element)),
      question(2, h("div", { class: "two wide-left" }, table.element, star.element)),
      question(3, safety.element),
      W5.panel("life", "Life of a batch", lanes.element),
      W5.panel("events", "Events", events.element),
      W5.panel("run", "Run", run.element)),
    h("footer", { class: "dim" }, "Keys: 1 to 4 jump to a question, / filters nodes."));

  const charts = () => [loss, speed, ...(comparison ? [comparison.chart] : [])];
  const known = () => [...nodes];
  let isDue = false;
  /* Draw once for all that came together. */
  function due() {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      loss.update();
      speed.update();
      bars.update(known());
      table.update(known());
      star.update(known());
    });
  }

  function heard(kind, data) {
    if (kind === "history") points.load(data);
    else if (kind === "row") points.add(data);
    else if (kind === "nodes") for (const [name, node] of Object.entries(data)) nodes.set(name, node);
    else if (kind === "events") events.load(data);
    else if (kind === "more events") events.add(data);
    else if (kind === "trace") lanes.load(data);
    else if (kind === "more trace") lanes.add(data);
    else if (kind === "about") showAbout(data);
    else if (kind === "now") return showNow(data);
    due();
  }

  function showAbout(data) {
    about = data;
    W5.say(title, about.name);
    run.update(about);
  }

  function showNow(data) {
    if (W5.isOver !== data.is_over) due();
    W5.isOver = data.is_over;
    now = data;
    heardAt = performance.now();
    const share = now.steps_total ? now.step / now.steps_total : now.is_over ? 1 : 0;
    W5.say(pill, now.state);
    pill.className = `pill ${now.state}`;
    pill.title = now.state_text;
    progress.firstChild.style.width = `${100 * share}%`;
    progress.setAttribute("aria-valuenow", String(Math.round(100 * share)));
    const epoch = now.epochs_total ? `epoch ${Math.min(now.epoch + 1, now.epochs_total)}/${now.epochs_total}` : now.epoch !== undefined ? `epoch ${now.epoch + 1}` : "";
    const step = now.step === undefined ? "" : `step ${W5.whole(now.step)}${now.steps_total ? ` of ${W5.whole(now.steps_total)}` : ""}`;
    const words = [epoch, step, now.steps_total ? `${Math.floor(100 * share)} %` : "", now.is_over ? (now.seconds ? `in ${W5.duration(now.seconds)}` : "") : now.left ? `${now.left} left` : ""];
    W5.say(facts, words.filter(Boolean).join(" · "));
    now.sentences.forEach((each, at) => {
      W5.say(sentences[at], each.text);
      sentences[at].className = `sentence ${each.tone}`;
    });
    loss.label(`loss. ${now.sentences[0].text}`);
    speed.label(`samples a second. ${now.sentences[1].text}`);
    warn(now.warning);
    document.title = `${now.is_over ? "" : "● "}${now.steps_total ? `${Math.floor(100 * share)} % ` : ""}${about ? about.name : "w5xde"}`;
    safety.update(now);
    tick();
  }

  function warn(text) {
    banner.hidden = !text;
    W5.say(banner, text || "");
  }

  /* The age of the data goes on while nothing is heard. */
  function tick() {
    if (!now || now.age === null || now.is_over) return W5.say(age, "");
    const old = now.age + (performance.now() - heardAt) / 1000;
    W5.say(age, `data ${W5.duration(old)} old`);
    age.classList.toggle("old", old > 3);
  }

  function lost(error) {
    if (!error) return warn(now ? now.warning : "");
    const name = about ? about.name : "RUN";
    if (error.status === 401) warn("This browser is not logged in. Open the link that  w5xde show  prints; each link works once.");
    else warn(`The page's process does not answer. It goes on by itself if that comes back; open it again:  w5xde show ${name}`);
  }

  function compare(names) {
    if (names.length < 2) return null;
    comparison = W5.comparison(names);
    W5.fill(compared, W5.panel("compare", `${names.length} runs`, comparison.element));
    return comparison;
  }

  async function live() {
    await connection.login().catch(lost);
    try {
      const { runs } = await connection.json("/api/runs");
      if (compare(runs)) {
        const load = async () => comparison.load(await Promise.all(runs.map((name, at) => connection.json(`/api/runs/${at}/history`))));
        await load();
        setInterval(() => { if (!document.hidden) load().catch(() => {}); }, 5000);
      }
    } catch (error) {
      lost(error);
      if (error.status === 401) return;
    }
    connection.follow("/api/runs/0/stream");
    setInterval(tick, 500);
  }

  function offline() {
    if (compare(stored.runs)) comparison.load(stored.others);
    for (const kind of ["about", "history", "nodes", "events", "trace", "now"]) heard(kind, stored.run[kind]);
  }

  addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^[1-4]$/.test(event.key)) document.getElementById(`q${event.key}`).focus();
    else if (event.key === "/" && !table.filter.hidden) { event.preventDefault(); table.filter.focus(); }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { charts().forEach((chart) => chart.rebuild()); lanes.draw(); });
  if (stored) offline();
  else live();
};
W5.start();
